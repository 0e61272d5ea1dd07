"""Correlation of BrierLM with cross-entropy, across models and training steps."""

import numpy as np

from calm.paper.experiment import BRIERS, Experiment, Figure, Lookup, Row
from calm.paper.measures import scores
from calm.paper.scales import Scale
from calm.paper.values import NO, UNDECIDED, YES, Table, Verdict

PAPER = {"Pearson": -0.966, "Spearman": -0.991}
STRONG = -0.9  # upper bound of a strong negative correlation
MIN_POINTS = 4


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    return [
        Row(f"Transformer-{size}, {steps:,} steps", (scores(run, scale, stride=1),), {}, f"Transformer-{size}")
        for size in ("S", "M", "L")
        for steps, run in scale.training_curve(scale.transformer(size))
    ]


def correlations(nats: list[float], scores: list[float]) -> dict[str, float]:
    """Pearson and Spearman (rank) correlation coefficients."""
    pairs = np.array([nats, scores])
    ranks = pairs.argsort(axis=1).argsort(axis=1)
    return {name: float(np.atleast_2d(np.corrcoef(x))[0, 1]) for name, x in (("Pearson", pairs), ("Spearman", ranks))}


def claims(table: Table) -> list[Verdict]:
    defined = [line.values for line in table.lines.values() if line.values["brier_lm"].value is not None]
    count = f"{len(defined)} of {len(table.lines)} points have a defined BrierLM"
    if len(defined) < MIN_POINTS:
        return [Verdict("BrierLM correlates with cross-entropy", UNDECIDED, count)]
    coefficients = correlations(
        *([values[name].bounds[1] for values in defined] for name in ("cross_entropy", "brier_lm"))
    )
    return [
        Verdict(
            f"the {name} correlation is strong",
            YES if value < STRONG else NO,
            f"{value:.3f} (paper: {PAPER[name]}); {count}",
        )
        for name, value in coefficients.items()
    ]


EXPERIMENT = Experiment(
    "brier-correlation",
    "BrierLM vs. cross-entropy",
    "figure “Joint distribution of cross-entropy and BrierLM”",
    "The correlation coefficients are -0.966 (Pearson) and -0.991 (Spearman).",
    rows,
    {"cross_entropy": "cross-entropy (nats per token)"} | BRIERS,
    Figure("cross-entropy (nats per token)", x_column="cross_entropy", annotate=False),
    claims,
    repeat=None,
)
