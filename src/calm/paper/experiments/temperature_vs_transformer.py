"""CALM candidates compared with Transformer temperatures, at equal BrierLM."""

from typing import Any

import numpy as np

from calm.evaluate.brier_lm import BrierLM
from calm.paper.experiment import Experiment, Figure, Lookup, Row
from calm.paper.experiments.temperature_tradeoff import BY_CANDIDATES, FIRST, TRADEOFF, by_candidates
from calm.paper.measures import scores, tradeoff
from calm.paper.scales import Scale
from calm.paper.values import NO, UNDECIDED, YES, Table, Verdict

TEMPERATURES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
SOFTMAX = "Transformer, temperature T"


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    """Rows with the BrierLM of CALM and of a Transformer during training; once measured, also the trade-off curves.

    The trade-off of the Transformer is measured after the number of steps at which its BrierLM is closest to CALM's.
    """
    calm = scores(scale.calm(), scale)
    curve = [(steps, run, scores(run, scale)) for steps, run in scale.training_curve(scale.transformer())]
    table_rows = [Row("CALM", (calm,))]
    table_rows += [Row(f"Transformer, {steps:,} steps", (measure,)) for steps, _, measure in curve]
    target = _score(lookup(calm))
    if target is None or any(lookup(measure) is None for *_, measure in curve):
        return table_rows
    nearest = min(curve, key=lambda point: abs(_score(lookup(point[2])) - target))[1]
    softmax = [Row(f"Transformer, T = {t:g}", (tradeoff(nearest, scale, t),), {}, SOFTMAX, t) for t in TEMPERATURES]
    return table_rows + by_candidates(scale) + softmax


def _score(result: dict[str, Any] | None) -> Any:
    """Logarithm of BrierLM; if it is undefined, that of Brier-1, shifted below all defined scores."""
    if result is None:
        return None
    brier = BrierLM.from_json(result["sums"]).compute(resamples=2)
    brier_lm, brier_1 = brier["brier_lm"].value, brier["brier_1"].value
    return np.log(brier_lm) if brier_lm is not None else -100 + np.log(max(brier_1, 1e-9))


def claims(table: Table) -> list[Verdict]:
    calm, softmax = table.series(BY_CANDIDATES), table.series(SOFTMAX)
    if not softmax:
        return [Verdict("both lie on the same curve", UNDECIDED, "not measured")]
    curve = sorted((line.values["collision"].bounds[1], line.values["accuracy"].bounds[1]) for line in softmax)
    collisions, accuracies = zip(*curve, strict=True)
    agrees, differences = [], []
    for line in calm:
        _, accuracy, high = line.values["accuracy"].bounds
        collision = line.values["collision"].bounds[1]
        if collisions[0] <= collision <= collisions[-1]:
            difference = accuracy - np.interp(collision, collisions, accuracies)
            agrees.append(abs(difference) <= high - accuracy)
            differences.append(f"N = {line.row.x:g}: {difference:+.2f}")
    if not agrees:
        return [Verdict("both lie on the same curve", UNDECIDED, "no CALM point is in the range of the Transformer's")]
    answer = YES if all(agrees) else NO
    return [
        Verdict(
            "both lie on the same curve, within 95% intervals",
            answer,
            "accuracy minus the Transformer's: " + ", ".join(differences),
        )
    ]


EXPERIMENT = Experiment(
    "temperature-vs-transformer",
    "Candidates vs. softmax temperature",
    "figure “Comparison of temperature sampling”",
    "At equal BrierLM, varying N at T = 1/3 gives the same curve as varying the Transformer's temperature.",
    rows,
    {"brier_lm": "BrierLM"} | TRADEOFF | FIRST,
    Figure("collision (percent; lower is more diverse)", {"accuracy": "accuracy (percent)"}, x_column="collision"),
    claims,
    repeat=None,
    chunk_sizes=(4,),
)
