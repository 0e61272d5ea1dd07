"""The autoencoder: regularizers (Table 2), weight of the KL divergence, latent dimension, and scale."""

from typing import Any

from calm.paper.experiment import BRIERS, RECONSTRUCTION, SCORES, TWO_SCORES, Experiment, Figure, Lookup, Row
from calm.paper.measures import Measure, reconstruction, scores
from calm.paper.scales import STEPS, Scale

NO_DROPOUT = {"autoencoder.token_dropout": 0, "autoencoder.latent_dropout": 0}
REGULARIZERS = {  # settings that differ from the full recipe, and BrierLM in the paper
    "reconstruction only": ({**NO_DROPOUT, "autoencoder.variational": False}, 3.99),
    "KL": ({**NO_DROPOUT, "autoencoder.kl_floor": 0}, 3.48),
    "KL clipped": (NO_DROPOUT, 4.13),
    "KL clipped, DropToken": ({"autoencoder.latent_dropout": 0}, 4.55),
    "KL clipped, DropLatent": ({"autoencoder.token_dropout": 0}, 4.46),
    "KL clipped, both": ({}, 4.70),
}
KL_WEIGHTS: dict[float, dict[str, Any]] = {  # values reported in the paper
    **{0: {}, 1e-4: {}, 1e-3: {"brier_lm": 4.70}, 1e-2: {}, 1e-1: {"token_accuracy": "about 99"}}
}
DROPOUT = {0.25: 0.05, 0.5: 0.1, 1: 0.15, 2: 0.2}  # latent size relative to the default → dropout rate, as in the paper
MORE_DATA = 100 / 15  # billions of tokens


def measures(scale: Scale, changes: dict[str, Any]) -> tuple[Measure, Measure]:
    """Scores of the base model on an autoencoder with changed settings, and its reconstruction."""
    autoencoder = scale.autoencoder(changes)
    return scores(scale.calm(autoencoder=autoencoder), scale), reconstruction(autoencoder, scale)


def base_scores(scale: Scale, seed: int) -> Measure:
    """The base model and its autoencoder with another seed."""
    return scores(scale.calm(autoencoder=scale.autoencoder().with_seed(seed)).with_seed(seed), scale)


def kl_weight_rows(scale: Scale, lookup: Lookup) -> list[Row]:
    rows = []
    for weight, paper in KL_WEIGHTS.items():
        x = weight or 1e-5  # a logarithmic axis cannot show 0: draw it one decade to the left
        rows.append(Row(f"β = {weight:g}", measures(scale, {"autoencoder.kl_weight": weight}), paper, "energy head", x))
    return rows


def latent_size_rows(scale: Scale, lookup: Lookup) -> list[Row]:
    default = scale.autoencoder().base_config.autoencoder.latent_size
    rows = []
    for factor, dropout in DROPOUT.items():
        size = max(1, round(factor * default))
        changes = {"autoencoder.token_dropout": dropout, "autoencoder.latent_dropout": dropout}
        taken = measures(scale, {"autoencoder.latent_size": size, **changes})
        rows.append(Row(f"Z × {factor:g}", taken, {"brier_lm": 4.70} if factor == 1 else {}, "energy head", size))
    return rows


def scale_rows(scale: Scale, lookup: Lookup) -> list[Row]:
    config = scale.autoencoder().base_config
    widths = {"hidden_size": config.autoencoder.hidden_size, "intermediate_size": config.autoencoder.intermediate_size}
    variants = {
        "baseline": {},
        "2× layers": {"autoencoder.num_encoder_layers": 4, "autoencoder.num_decoder_layers": 4},
        "2× width": {f"autoencoder.{name}": 2 * width for name, width in widths.items()},
        "more data": {STEPS: round(MORE_DATA * config.train.steps)},
    }
    return [
        Row(label, measures(scale, changes), {} if changes else {"brier_lm": 4.70})
        for label, changes in variants.items()
    ]


EXPERIMENTS = (
    Experiment(
        name="autoencoder-ablation",
        title="Autoencoder regularizers",
        source="Table 2",
        finding="KL without clipping hurts (71 of 128 dimensions collapse); with clipping it helps. Both kinds of "
        "dropout help, and their combination is best.",
        rows=lambda scale, _: [
            Row(label, measures(scale, changes), {"brier_lm": reported})
            for label, (changes, reported) in REGULARIZERS.items()
        ],
        claims=lambda table: [
            table.better("KL without clipping is worse than no KL", "reconstruction only", "KL"),
            table.better("clipped KL is better than no KL", "KL clipped", "reconstruction only"),
            table.better("adding DropToken helps", "KL clipped, DropToken", "KL clipped"),
            table.better("adding DropLatent helps", "KL clipped, DropLatent", "KL clipped"),
            table.better("both are better than DropToken alone", "KL clipped, both", "KL clipped, DropToken"),
            table.better("both are better than DropLatent alone", "KL clipped, both", "KL clipped, DropLatent"),
        ],
        columns={**BRIERS, **RECONSTRUCTION, "collapsed_dimensions": "collapsed dimensions"},
        figure=Figure(panels=TWO_SCORES),
        repeat=base_scores,
    ),
    Experiment(
        name="kl-weight",
        title="Weight of the KL divergence",
        source="figure “Effect of the KL divergence weight”",
        finding="A small weight improves BrierLM without affecting reconstruction; at 0.1 both degrade.",
        rows=kl_weight_rows,
        claims=lambda table: [
            table.better("β = 0.001 is better than no KL", "β = 0.001", "β = 0"),
            table.better("β = 0.1 is too large: 0.001 is better", "β = 0.001", "β = 0.1"),
        ],
        columns=BRIERS | RECONSTRUCTION,
        figure=Figure("weight β of the KL divergence (leftmost: 0)", TWO_SCORES | RECONSTRUCTION, log_x=True),
        repeat=base_scores,
    ),
    Experiment(
        name="latent-size",
        title="Latent dimension",
        source="figure “Effect of the latent dimension”",
        finding="Reconstruction accuracy is high for 32, 64, 128 and 256 dimensions; BrierLM is best for 128.",
        rows=latent_size_rows,
        claims=lambda table: [
            table.better("the default size is better than a quarter of it", "Z × 1", "Z × 0.25"),
            table.better("the default size is better than twice the size", "Z × 1", "Z × 2"),
        ],
        columns={"latent_size": "Z", **BRIERS, **RECONSTRUCTION},
        figure=Figure("latent dimension Z", SCORES | RECONSTRUCTION, log_x=True),
        repeat=base_scores,
    ),
    Experiment(
        name="autoencoder-scale",
        title="Larger autoencoders",
        source="§7.3, “Scale”",
        finding="Twice the layers, twice the width, or 100 instead of 15 billion tokens give no significant gain.",
        rows=scale_rows,
        claims=lambda table: [
            table.better(f"{label}: better than the baseline (paper: no)", label, "baseline")
            for label in ("2× layers", "2× width", "more data")
        ],
        columns=BRIERS | RECONSTRUCTION,
        repeat=base_scores,
    ),
)
