"""Input of the backbone: tokens, latents, or both."""

from calm.paper.experiment import BRIERS, TWO_SCORES, Experiment, Figure, Lookup, Row
from calm.paper.measures import scores
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

PAPER = {
    "discrete": (21.81, 6.88, 2.59, 1.25, 4.70),
    "continuous": (17.43, 5.04, 1.74, 0.73, 3.25),
    "both": (21.17, 6.49, 2.44, 1.12, 4.40),
}


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    return [
        Row(
            kind,
            (scores(scale.calm({"language_model.model_input": kind}), scale),),
            dict(zip(BRIERS, reported, strict=True)),
        )
        for kind, reported in PAPER.items()
    ]


def claims(table: Table) -> list[Verdict]:
    return [
        table.better("discrete input is better than continuous input", "discrete", "continuous"),
        table.better("discrete input alone is better than both", "discrete", "both"),
        table.better("both are better than continuous input alone", "both", "continuous"),
    ]


EXPERIMENT = Experiment(
    "model-input",
    "Backbone input",
    "table “Effect of model input”",
    "Discrete input is best, both slightly worse, continuous input much worse.",
    rows,
    BRIERS,
    Figure(panels=TWO_SCORES),
    claims,
)
