"""What the backbone reads: tokens, latents, or both."""

from calm.paper.experiment import BRIERS, TWO_SCORES, Experiment, Figure, Known, Row
from calm.paper.measures import scores
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

PAPER = {
    "discrete": (21.81, 6.88, 2.59, 1.25, 4.70),
    "continuous": (17.43, 5.04, 1.74, 0.73, 3.25),
    "both": (21.17, 6.49, 2.44, 1.12, 4.40),
}


def rows(scale: Scale, known: Known) -> list[Row]:
    return [
        Row(
            kind,
            (scores(scale.calm({"language_model.model_input": kind}), scale),),
            dict(zip(BRIERS, printed, strict=True)),
        )
        for kind, printed in PAPER.items()
    ]


def claims(table: Table) -> list[Verdict]:
    return [
        table.better("tokens are better than latents", "discrete", "continuous"),
        table.better("latents beside tokens do not help", "discrete", "both"),
        table.better("both are better than latents alone", "both", "continuous"),
    ]


EXPERIMENT = Experiment(
    "model-input",
    "What the backbone reads",
    "table “Effect of model input”",
    "Discrete input is best, both a little worse, continuous far worse.",
    rows,
    BRIERS,
    Figure(panels=TWO_SCORES),
    claims,
)
