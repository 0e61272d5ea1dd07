"""The size of the latent."""

from calm.paper.experiment import BRIERS, RECONSTRUCTION, SCORES, Experiment, Figure, Known, Row
from calm.paper.measures import on_autoencoder, repeated_from_the_autoencoder_on
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

DROPOUT = {0.25: 0.05, 0.5: 0.1, 1: 0.15, 2: 0.2}  # at so many times the usual size, as in the paper


def rows(scale: Scale, known: Known) -> list[Row]:
    usual = scale.autoencoder().plain.autoencoder.latent_size
    found = []
    for times, dropout in DROPOUT.items():
        size = max(1, round(times * usual))
        rates = {"autoencoder.token_dropout": dropout, "autoencoder.latent_dropout": dropout}
        below = scale.autoencoder({"autoencoder.latent_size": size, **rates})
        printed = {"brier_lm": 4.70} if times == 1 else {}
        found.append(Row(_label(times), on_autoencoder(below, scale), printed, "energy head", size))
    return found


def _label(times: float) -> str:
    return f"Z × {times:g}"


def claims(table: Table) -> list[Verdict]:
    return [
        table.better("the usual size is better than a quarter", _label(1), _label(0.25)),
        table.better("the usual size is better than twice as much", _label(1), _label(2)),
    ]


EXPERIMENT = Experiment(
    "latent-size",
    "Size of the latent",
    "figure “Effect of the latent dimension”",
    "Reconstruction is high at 32, 64, 128 and 256; BrierLM is best at 128.",
    rows,
    {"latent_size": "Z"} | BRIERS | RECONSTRUCTION,
    Figure(
        "latent dimensions Z",
        SCORES | RECONSTRUCTION,
        log_x=True,
    ),
    claims,
    repeat=repeated_from_the_autoencoder_on,
)
