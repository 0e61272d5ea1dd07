"""BrierLM during training."""

from calm.paper.experiment import BRIERS, Experiment, Figure, Lookup, Row
from calm.paper.measures import scores
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    models = {f"Transformer-{size}": scale.transformer(size) for size in ("S", "M", "L")}
    models["CALM-XL"] = scale.calm(size="XL")
    return [
        Row(f"{name}, {steps:,} steps", (scores(run, scale),), {}, name, steps)
        for name, model in models.items()
        for steps, run in scale.training_curve(model)
    ]


def claims(table: Table) -> list[Verdict]:
    calm, baseline = (table.series(name) for name in ("CALM-XL", "Transformer-M"))
    first, last = ((calm[end].row.label, baseline[end].row.label) for end in (0, -1))
    return [
        table.better("CALM-XL is worse than Transformer-M at the start of training", first[1], first[0]),
        table.better("CALM-XL is better than Transformer-M at the end of training", *last),
    ]


EXPERIMENT = Experiment(
    "training-curves",
    "BrierLM during training",
    "figure “Training progress”",
    "Transformers improve fast and saturate. CALM-XL starts below Transformer-M and approaches Transformer-L.",
    rows,
    BRIERS,
    Figure("training steps"),
    claims,
)
