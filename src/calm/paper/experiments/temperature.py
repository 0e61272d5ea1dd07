"""Sampling at low temperatures (Algorithm 2): accuracy against diversity, and comparison with a Transformer."""

from typing import Any

import numpy as np

from calm.evaluate.brier_lm import BrierLM
from calm.paper.experiment import NO, UNDECIDED, YES, Experiment, Figure, Line, Lookup, Row, Table, Verdict
from calm.paper.measures import scores, tradeoff
from calm.paper.scales import Scale

BY_CANDIDATES = "T = 1/3, candidates N"
BY_SOFTMAX = "Transformer, temperature T"
TEMPERATURES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)  # of the Transformer
COLUMNS = {
    "accuracy": "accuracy (%)",
    "collision": "collision (%)",
    "accuracy_1": "accuracy, first token",
    "collision_1": "collision, first token",
}
FIGURE = Figure("collision (percent; lower is more diverse)", {"accuracy": "accuracy (percent)"}, x_column="collision")


def rows_by_candidates(scale: Scale) -> list[Row]:
    run = scale.calm()
    return [Row(f"T = 1/3, N = {n}", (tradeoff(run, scale, 1 / 3, n),), {}, BY_CANDIDATES, n) for n in scale.candidates]


def tradeoff_rows(scale: Scale, lookup: Lookup) -> list[Row]:
    run, fixed = scale.calm(), scale.candidates[-2]
    series = f"N = {fixed}, temperature 1/n"
    return rows_by_candidates(scale) + [
        Row(f"N = {fixed}, T = 1/{n}", (tradeoff(run, scale, 1 / n, fixed),), {}, series, n) for n in (2, 3, 4, 5, 6)
    ]


def tradeoff_claims(table: Table) -> list[Verdict]:
    candidates = table.series(BY_CANDIDATES)
    temperatures = [line for line in table.lines.values() if line not in candidates]
    spans = []
    for lines in (candidates, temperatures):
        values = [line.values["collision"].bounds[1] for line in lines]
        spans.append(max(values) - min(values))
    numbers = f"collision spans {spans[0]:.2f} percentage points across N and {spans[1]:.2f} across T"
    return [
        _increase("more candidates increase accuracy", candidates, "accuracy"),
        _increase("more candidates reduce diversity", candidates, "collision"),
        Verdict("N covers a wider range than T", YES if spans[0] > spans[1] else NO, numbers),
    ]


def _increase(claim: str, lines: list[Line], column: str) -> Verdict:
    """Test whether the last point of a curve is above the first, with disjoint intervals."""
    first, last = (lines[index].values[column].bounds for index in (0, -1))
    formatted = [f"{value:.2f} ({low:.2f} to {high:.2f})" for low, value, high in (first, last)]
    answer = YES if last[0] > first[2] else NO if last[2] < first[0] else UNDECIDED
    return Verdict(claim, answer, f"{column} {formatted[0]} → {formatted[1]}")


def comparison_rows(scale: Scale, lookup: Lookup) -> list[Row]:
    """Rows with the BrierLM of CALM and of a Transformer during training; once measured, also the trade-off curves.

    The trade-off of the Transformer is measured after the number of steps at which its BrierLM is closest to CALM's.
    """
    curve = scale.training_curve(scale.transformer())
    models = {"CALM": scale.calm()} | {f"Transformer, {steps:,} steps": run for steps, run in curve}
    rows = [Row(label, (scores(run, scale),)) for label, run in models.items()]
    results = [result for row in rows if (result := lookup(row.measures[0])) is not None]
    if len(results) < len(rows):
        return rows
    calm, *transformers = (_log_score(result) for result in results)
    differences = [abs(score - calm) for score in transformers]
    _, run = curve[differences.index(min(differences))]
    softmax = [Row(f"Transformer, T = {t:g}", (tradeoff(run, scale, t),), {}, BY_SOFTMAX, t) for t in TEMPERATURES]
    return rows + rows_by_candidates(scale) + softmax


def _log_score(result: dict[str, Any]) -> float:
    """Logarithm of BrierLM; if it is undefined, that of Brier-1, shifted below all defined scores."""
    brier = BrierLM.from_json(result["sums"]).compute(resamples=2)
    brier_lm, brier_1 = brier["brier_lm"].value, brier["brier_1"].value
    return np.log(brier_lm) if brier_lm is not None else -100 + np.log(max(brier_1, 1e-9))


def comparison_claims(table: Table) -> list[Verdict]:
    claim = "both lie on the same curve"
    calm, softmax = table.series(BY_CANDIDATES), table.series(BY_SOFTMAX)
    if not softmax:
        return [Verdict(claim, UNDECIDED, "not measured")]
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
        return [Verdict(claim, UNDECIDED, "no CALM point is in the range of the Transformer's")]
    numbers = "accuracy minus the Transformer's: " + ", ".join(differences)
    return [Verdict(f"{claim}, within 95% intervals", YES if all(agrees) else NO, numbers)]


EXPERIMENTS = (
    Experiment(
        name="temperature-tradeoff",
        title="Candidates and temperature",
        source="figure “The accuracy-diversity trade-off”",
        finding="More candidates and lower temperatures increase accuracy and reduce diversity. The number of "
        "candidates covers a wider range.",
        rows=tradeoff_rows,
        claims=tradeoff_claims,
        columns=COLUMNS,
        figure=FIGURE,
        repeat=None,
        chunk_sizes=(4,),
        note="Geometric means over 1- to 4-grams, as in the paper. Algorithm 2 samples whole chunks.",
    ),
    Experiment(
        name="temperature-vs-transformer",
        title="Candidates vs. softmax temperature",
        source="figure “Comparison of temperature sampling”",
        finding="At equal BrierLM, varying N at T = 1/3 gives the same curve as varying the Transformer's temperature.",
        rows=comparison_rows,
        claims=comparison_claims,
        columns={"brier_lm": "BrierLM", **COLUMNS},
        figure=FIGURE,
        repeat=None,
        chunk_sizes=(4,),
    ),
)
