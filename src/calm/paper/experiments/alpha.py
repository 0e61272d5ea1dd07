"""Exponent α of the energy score."""

from calm.paper.experiment import BRIERS, TWO_SCORES, Experiment, Figure, Lookup, Row
from calm.paper.measures import scores
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

PAPER = {0.75: "failed", 1.0: 4.70, 1.25: 4.42, 1.5: 4.46, 1.75: 4.30, 2.0: 0}


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    return [
        Row(
            f"α = {alpha:g}",
            (scores(scale.calm({"language_model.alpha": alpha}), scale),),
            {"brier_lm": reported},
            "energy head",
            alpha,
        )
        for alpha, reported in PAPER.items()
    ]


def claims(table: Table) -> list[Verdict]:
    best = "α = 1"
    return [
        table.fails_to_learn("training fails for α < 1", "α = 0.75"),
        table.better("α = 1 is better than 1.25", best, "α = 1.25"),
        table.better("α = 1 is better than 1.5", best, "α = 1.5"),
        table.better("α = 1 is better than 1.75", best, "α = 1.75"),
        table.fails_to_learn("α = 2 learns nothing: the score is not strictly proper", "α = 2"),
    ]


EXPERIMENT = Experiment(
    "alpha",
    "Exponent of the energy score",
    "table “Effect of the exponent α”",
    "Training fails for α < 1. α = 1 is best, values up to 1.75 are slightly worse, and BrierLM is 0 at α = 2.",
    rows,
    BRIERS,
    Figure("exponent α of the energy score", TWO_SCORES),
    claims,
)
