"""The numbers of samples in the energy loss: N of the model, M of the target."""

from typing import Any

from calm.paper.experiment import BRIERS, Experiment, Figure, Known, Row
from calm.paper.measures import scores, step_time
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

PAPER = {  # (N, M): BrierLM, relative cost; M = None is the closed form, which the paper does not have
    (2, 100): (4.37, 0.82),
    (4, 100): (4.53, 0.91),
    (8, 100): (4.70, 1.0),
    (12, 100): (4.72, 1.13),
    (8, 1): (4.50, 0.92),
    (8, 16): (4.56, 0.94),
    (8, 200): (4.67, 1.07),
    (8, None): (None, None),
}
USUAL = (8, 100)


def _label(model: int, target: int | None) -> str:
    return f"N = {model}, M = {target or '∞'}"


def rows(scale: Scale, known: Known) -> list[Row]:
    found = []
    for (model, target), printed in PAPER.items():
        run = scale.calm({"language_model.num_model_samples": model, "language_model.num_target_samples": target})
        columns: dict[str, Any] = dict(zip(("brier_lm", "relative_cost"), printed, strict=True))
        found.append(Row(_label(model, target), (scores(run, scale), step_time(run)), columns))
    return found


def claims(table: Table) -> list[Verdict]:
    usual = _label(*USUAL)
    return [
        table.better("8 samples are better than 2", usual, _label(2, 100)),
        table.better("8 samples are better than 4", usual, _label(4, 100)),
        table.better("12 are better than 8 (the paper: hardly)", _label(12, 100), usual),
        table.better("100 targets are better than 1", usual, _label(8, 1)),
        table.better("100 targets are better than 16", usual, _label(8, 16)),
        table.better("the closed form is better than 100 targets", _label(8, None), usual),
    ]


EXPERIMENT = Experiment(
    "samples",
    "Samples in the energy loss",
    "table “Effect of N and M”",
    "More samples are better and cost more; N = 8 and M = 100 are a balance.",
    rows,
    BRIERS | {"step_seconds": "seconds a step", "relative_cost": "relative cost"},
    Figure(panels={"brier_lm": "BrierLM (percent)", "relative_cost": "time of a step, relative"}),
    claims,
    reference=_label(*USUAL),
    note="M = ∞ is the closed form of the target's term, the default here. Time is processor time of a step.",
)
