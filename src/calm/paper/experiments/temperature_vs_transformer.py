"""CALM's candidates against a Transformer's temperatures, at equal BrierLM."""

from typing import Any

import numpy as np

from calm.evaluate.brier_lm import BrierLM
from calm.paper.experiment import Experiment, Figure, Known, Row
from calm.paper.experiments.temperature_tradeoff import BY_CANDIDATES, FIRST, PLANE, by_candidates
from calm.paper.measures import scores, tradeoff
from calm.paper.scales import Scale
from calm.paper.values import NO, OPEN, YES, Table, Verdict

TEMPERATURES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
SOFTMAX = "Transformer, temperature T"


def rows(scale: Scale, known: Known) -> list[Row]:
    """First the scores that tell which moment of the Transformer is as good as the CALM model."""
    calm = scores(scale.calm(), scale)
    moments = [(steps, run, scores(run, scale)) for steps, run in scale.along(scale.transformer())]
    found = [Row("CALM", (calm,)), *(Row(f"Transformer, {steps:,} steps", (wanted,)) for steps, _, wanted in moments)]
    target = _score(known(calm))
    if target is None or any(known(wanted) is None for *_, wanted in moments):
        return found
    nearest = min(moments, key=lambda moment: abs(_score(known(moment[2])) - target))[1]
    softmax = [Row(f"Transformer, T = {t:g}", (tradeoff(nearest, scale, t),), {}, SOFTMAX, t) for t in TEMPERATURES]
    return found + by_candidates(scale) + softmax


def _score(answer: dict[str, Any] | None) -> Any:
    """The logarithm of BrierLM, or of Brier-1 where there is none (below all that have one)."""
    if answer is None:
        return None
    found = BrierLM.from_json(answer["sums"]).compute(redraws=2)
    whole, first = found["brier_lm"].value, found["brier_1"].value
    return np.log(whole) if whole is not None else -100 + np.log(max(first, 1e-9))


def claims(table: Table) -> list[Verdict]:
    calm, softmax = table.series(BY_CANDIDATES), table.series(SOFTMAX)
    if not softmax:
        return [Verdict("both lie on one curve", OPEN, "not measured")]
    curve = sorted((line.values["collision"].ends[1], line.values["accuracy"].ends[1]) for line in softmax)
    places, heights = zip(*curve, strict=True)
    near, shown = [], []
    for line in calm:
        _, accuracy, high = line.values["accuracy"].ends
        collision = line.values["collision"].ends[1]
        if places[0] <= collision <= places[-1]:
            difference = accuracy - np.interp(collision, places, heights)
            near.append(abs(difference) <= high - accuracy)
            shown.append(f"N = {line.row.x:g}: {difference:+.2f}")
    if not near:
        return [Verdict("both lie on one curve", OPEN, "no point of CALM lies between the Transformer's")]
    answer = YES if all(near) else NO
    return [
        Verdict(
            "both lie on one curve, within the 95% intervals",
            answer,
            "accuracy less the Transformer's: " + ", ".join(shown),
        )
    ]


EXPERIMENT = Experiment(
    "temperature-vs-transformer",
    "Candidates against a softmax's temperature",
    "figure “Comparison of temperature sampling”",
    "At equal BrierLM the curve by N at T = 1/3 is that of the Transformer's temperatures.",
    rows,
    {"brier_lm": "BrierLM"} | PLANE | FIRST,
    Figure("collision (percent): less is more diverse", {"accuracy": "accuracy (percent)"}, over="collision"),
    claims,
    repeat=None,
    chunk_sizes=(4,),
)
