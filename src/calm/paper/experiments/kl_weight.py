"""The weight of the KL divergence."""

from calm.paper.experiment import BRIERS, RECONSTRUCTION, TWO_SCORES, Experiment, Figure, Known, Row
from calm.paper.measures import on_autoencoder, repeated_from_the_autoencoder_on
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

WEIGHTS = (0, 1e-4, 1e-3, 1e-2, 1e-1)
PAPER = {1e-3: {"brier_lm": 4.70}, 1e-1: {"token_accuracy": "about 99"}}


def rows(scale: Scale, known: Known) -> list[Row]:
    found = []
    for weight in WEIGHTS:
        below = scale.autoencoder({"autoencoder.kl_weight": weight})
        x = weight or WEIGHTS[1] / 10  # 0 has no place on a logarithmic axis: a step to the left
        found.append(Row(f"β = {weight:g}", on_autoencoder(below, scale), PAPER.get(weight, {}), "energy head", x))
    return found


def claims(table: Table) -> list[Verdict]:
    return [
        table.better("some KL helps", "β = 0.001", "β = 0"),
        table.better("too much harms", "β = 0.001", "β = 0.1"),
    ]


EXPERIMENT = Experiment(
    "kl-weight",
    "Weight of the KL divergence",
    "figure “Effect of the KL divergence weight”",
    "A little KL improves BrierLM and leaves reconstruction alone; at 0.1 both fall.",
    rows,
    BRIERS | RECONSTRUCTION,
    Figure(
        "weight β of the KL divergence (leftmost: 0)",
        TWO_SCORES | RECONSTRUCTION,
        log_x=True,
    ),
    claims,
    repeat=repeated_from_the_autoencoder_on,
)
