"""BrierLM over the course of training."""

from calm.paper.experiment import BRIERS, Experiment, Figure, Known, Row
from calm.paper.measures import scores
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict


def rows(scale: Scale, known: Known) -> list[Row]:
    models = {f"Transformer-{size}": scale.transformer(size) for size in ("S", "M", "L")}
    models["CALM-XL"] = scale.calm(size="XL")
    return [
        Row(f"{name}, {steps:,} steps", (scores(run, scale),), {}, name, steps)
        for name, whole in models.items()
        for steps, run in scale.along(whole)
    ]


def claims(table: Table) -> list[Verdict]:
    calm, baseline = (table.series(name) for name in ("CALM-XL", "Transformer-M"))
    first, last = ((calm[end].row.label, baseline[end].row.label) for end in (0, -1))
    return [
        table.better("at the beginning CALM-XL is behind Transformer-M", first[1], first[0]),
        table.better("at the end CALM-XL is ahead of Transformer-M", *last),
    ]


EXPERIMENT = Experiment(
    "training-curves",
    "BrierLM during training",
    "figure “Training progress”",
    "Transformers gain fast and saturate; CALM-XL begins behind Transformer-M and comes near Transformer-L.",
    rows,
    BRIERS,
    Figure("steps of training"),
    claims,
)
