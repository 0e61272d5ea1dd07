"""Number of samples in the energy loss: N from the model, M from the target posterior."""

from typing import Any

from calm.paper.experiment import BRIERS, Experiment, Figure, Lookup, Row
from calm.paper.measures import scores, step_time
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

PAPER = {  # (N, M): BrierLM, relative cost; M = None is the closed form, which is not in the paper
    (2, 100): (4.37, 0.82),
    (4, 100): (4.53, 0.91),
    (8, 100): (4.70, 1.0),
    (12, 100): (4.72, 1.13),
    (8, 1): (4.50, 0.92),
    (8, 16): (4.56, 0.94),
    (8, 200): (4.67, 1.07),
    (8, None): (None, None),
}
DEFAULT = (8, 100)


def _label(model: int, target: int | None) -> str:
    return f"N = {model}, M = {target or '∞'}"


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    table_rows = []
    for (model, target), reported in PAPER.items():
        run = scale.calm({"language_model.num_model_samples": model, "language_model.num_target_samples": target})
        columns: dict[str, Any] = dict(zip(("brier_lm", "relative_cost"), reported, strict=True))
        table_rows.append(Row(_label(model, target), (scores(run, scale), step_time(run)), columns))
    return table_rows


def claims(table: Table) -> list[Verdict]:
    default = _label(*DEFAULT)
    return [
        table.better("N = 8 is better than N = 2", default, _label(2, 100)),
        table.better("N = 8 is better than N = 4", default, _label(4, 100)),
        table.better("N = 12 is better than N = 8 (paper: barely)", _label(12, 100), default),
        table.better("M = 100 is better than M = 1", default, _label(8, 1)),
        table.better("M = 100 is better than M = 16", default, _label(8, 16)),
        table.better("the closed form is better than M = 100", _label(8, None), default),
    ]


EXPERIMENT = Experiment(
    "samples",
    "Samples in the energy loss",
    "table “Effect of N and M”",
    "More samples improve BrierLM and cost more. N = 8 and M = 100 are a good compromise.",
    rows,
    BRIERS | {"step_seconds": "seconds per step", "relative_cost": "relative cost"},
    Figure(panels={"brier_lm": "BrierLM (percent)", "relative_cost": "relative time per step"}),
    claims,
    cost_baseline=_label(*DEFAULT),
    note="M = ∞ is the closed form of the target term, which is the default in this package. Times are CPU time per "
    "training step.",
)
