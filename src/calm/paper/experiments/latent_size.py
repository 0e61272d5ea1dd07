"""Dimension Z of the latent vector."""

from calm.paper.experiment import BRIERS, RECONSTRUCTION, SCORES, Experiment, Figure, Lookup, Row
from calm.paper.measures import on_autoencoder, repeated_from_the_autoencoder_on
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

DROPOUT = {0.25: 0.05, 0.5: 0.1, 1: 0.15, 2: 0.2}  # latent size relative to the default → dropout rate, as in the paper


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    default = scale.autoencoder().base_config.autoencoder.latent_size
    table_rows = []
    for times, dropout in DROPOUT.items():
        size = max(1, round(times * default))
        rates = {"autoencoder.token_dropout": dropout, "autoencoder.latent_dropout": dropout}
        autoencoder = scale.autoencoder({"autoencoder.latent_size": size, **rates})
        reported = {"brier_lm": 4.70} if times == 1 else {}
        table_rows.append(Row(_label(times), on_autoencoder(autoencoder, scale), reported, "energy head", size))
    return table_rows


def _label(times: float) -> str:
    return f"Z × {times:g}"


def claims(table: Table) -> list[Verdict]:
    return [
        table.better("the default size is better than a quarter of it", _label(1), _label(0.25)),
        table.better("the default size is better than twice the size", _label(1), _label(2)),
    ]


EXPERIMENT = Experiment(
    "latent-size",
    "Latent dimension",
    "figure “Effect of the latent dimension”",
    "Reconstruction accuracy is high for 32, 64, 128 and 256 dimensions; BrierLM is best for 128.",
    rows,
    {"latent_size": "Z"} | BRIERS | RECONSTRUCTION,
    Figure(
        "latent dimension Z",
        SCORES | RECONSTRUCTION,
        log_x=True,
    ),
    claims,
    repeat=repeated_from_the_autoencoder_on,
)
