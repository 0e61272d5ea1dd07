"""BrierLM against cross-entropy, over models and moments of training."""

import numpy as np

from calm.paper.experiment import BRIERS, Experiment, Figure, Known, Row
from calm.paper.measures import scores
from calm.paper.scales import Scale
from calm.paper.values import NO, OPEN, YES, Table, Verdict

PAPER = {"Pearson": -0.966, "Spearman": -0.991}
CLOSE = -0.9  # a correlation that is called strong here
FEWEST = 4  # points that have a correlation


def rows(scale: Scale, known: Known) -> list[Row]:
    return [
        Row(f"Transformer-{size}, {steps:,} steps", (scores(run, scale, stride=1),), {}, f"Transformer-{size}")
        for size in ("S", "M", "L")
        for steps, run in scale.along(scale.transformer(size))
    ]


def correlations(nats: list[float], scores: list[float]) -> dict[str, float]:
    """Pearson's, and Spearman's: that of the ranks."""
    pairs = np.array([nats, scores])
    ranks = pairs.argsort(axis=1).argsort(axis=1)
    return {name: float(np.atleast_2d(np.corrcoef(x))[0, 1]) for name, x in (("Pearson", pairs), ("Spearman", ranks))}


def claims(table: Table) -> list[Verdict]:
    known = [line.values for line in table.lines.values() if line.values["brier_lm"].value is not None]
    count = f"{len(known)} of {len(table.lines)} points have a BrierLM"
    if len(known) < FEWEST:
        return [Verdict("BrierLM follows cross-entropy", OPEN, count)]
    found = correlations(*([values[name].ends[1] for values in known] for name in ("cross_entropy", "brier_lm")))
    return [
        Verdict(
            f"{name}'s correlation is strong",
            YES if value < CLOSE else NO,
            f"{value:.3f} (paper: {PAPER[name]}); {count}",
        )
        for name, value in found.items()
    ]


EXPERIMENT = Experiment(
    "brier-correlation",
    "BrierLM against cross-entropy",
    "figure “Joint distribution of cross-entropy and BrierLM”",
    "Pearson -0.966, Spearman -0.991.",
    rows,
    {"cross_entropy": "nats a token"} | BRIERS,
    Figure("cross-entropy (nats a token)", over="cross_entropy", named=False),
    claims,
    repeat=None,
)
