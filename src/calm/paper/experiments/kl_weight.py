"""Weight β of the KL divergence."""

from calm.paper.experiment import BRIERS, RECONSTRUCTION, TWO_SCORES, Experiment, Figure, Lookup, Row
from calm.paper.measures import on_autoencoder, repeated_from_the_autoencoder_on
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

WEIGHTS = (0, 1e-4, 1e-3, 1e-2, 1e-1)
PAPER = {1e-3: {"brier_lm": 4.70}, 1e-1: {"token_accuracy": "about 99"}}


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    table_rows = []
    for weight in WEIGHTS:
        measures = on_autoencoder(scale.autoencoder({"autoencoder.kl_weight": weight}), scale)
        x = weight or WEIGHTS[1] / 10  # a logarithmic axis cannot show 0: draw it one decade to the left
        table_rows.append(Row(f"β = {weight:g}", measures, PAPER.get(weight, {}), "energy head", x))
    return table_rows


def claims(table: Table) -> list[Verdict]:
    return [
        table.better("β = 0.001 is better than no KL", "β = 0.001", "β = 0"),
        table.better("β = 0.1 is too large: 0.001 is better", "β = 0.001", "β = 0.1"),
    ]


EXPERIMENT = Experiment(
    "kl-weight",
    "Weight of the KL divergence",
    "figure “Effect of the KL divergence weight”",
    "A small weight improves BrierLM without affecting reconstruction; at 0.1 both degrade.",
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
