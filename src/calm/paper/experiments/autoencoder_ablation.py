"""Table 2: what each regulariser of the autoencoder brings to the language model."""

from calm.paper.experiment import BRIERS, RECONSTRUCTION, TWO_SCORES, Experiment, Figure, Known, Row
from calm.paper.measures import on_autoencoder, repeated_from_the_autoencoder_on
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

OFF = {"autoencoder.token_dropout": 0, "autoencoder.latent_dropout": 0}
VARIANTS = {  # what differs from the full recipe, and the paper's BrierLM
    "reconstruction only": ({**OFF, "autoencoder.variational": False}, 3.99),
    "KL": ({**OFF, "autoencoder.kl_floor": 0}, 3.48),
    "KL clipped": (OFF, 4.13),
    "KL clipped, DropToken": ({"autoencoder.latent_dropout": 0}, 4.55),
    "KL clipped, DropLatent": ({"autoencoder.token_dropout": 0}, 4.46),
    "KL clipped, both": ({}, 4.70),
}


def rows(scale: Scale, known: Known) -> list[Row]:
    found = []
    for label, (changes, printed) in VARIANTS.items():
        below = scale.autoencoder(changes)
        found.append(Row(label, on_autoencoder(below, scale), {"brier_lm": printed}))
    return found


def claims(table: Table) -> list[Verdict]:
    return [
        table.better("a KL without clipping harms", "reconstruction only", "KL"),
        table.better("clipped it helps", "KL clipped", "reconstruction only"),
        table.better("DropToken helps", "KL clipped, DropToken", "KL clipped"),
        table.better("DropLatent helps", "KL clipped, DropLatent", "KL clipped"),
        table.better("both are better than DropToken alone", "KL clipped, both", "KL clipped, DropToken"),
        table.better("both are better than DropLatent alone", "KL clipped, both", "KL clipped, DropLatent"),
    ]


EXPERIMENT = Experiment(
    "autoencoder-ablation",
    "Regularisers of the autoencoder",
    "Table 2",
    "A plain KL harms (71 of 128 dimensions collapse), clipped it helps; both dropouts help, together most.",
    rows,
    BRIERS | RECONSTRUCTION | {"collapsed_dimensions": "collapsed dimensions"},
    Figure(panels=TWO_SCORES),
    claims,
    repeat=repeated_from_the_autoencoder_on,
)
