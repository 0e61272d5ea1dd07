"""Larger autoencoders, and more text for them."""

from calm.paper.experiment import BRIERS, RECONSTRUCTION, Experiment, Figure, Known, Row
from calm.paper.measures import on_autoencoder, repeated_from_the_autoencoder_on
from calm.paper.runs import STEPS
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

MORE_TEXT = 100 / 15  # billions of tokens


def rows(scale: Scale, known: Known) -> list[Row]:
    usual = scale.autoencoder()
    shape = usual.plain.autoencoder
    layers = {f"autoencoder.num_{part}_layers": 4 for part in ("encoder", "decoder")}
    sizes = {f"autoencoder.{name}": 2 * getattr(shape, name) for name in ("hidden_size", "intermediate_size")}
    variants = {
        "usual": {},
        "twice the layers": layers,
        "twice the width": sizes,
        "more text": {STEPS: round(MORE_TEXT * usual.steps)},
    }
    found = []
    for label, changes in variants.items():
        below = usual.but(changes)
        found.append(Row(label, on_autoencoder(below, scale), {"brier_lm": 4.70} if not changes else {}))
    return found


def claims(table: Table) -> list[Verdict]:
    return [table.better(f"{label} helps (the paper: no)", label, "usual") for label in list(table.lines)[1:]]


EXPERIMENT = Experiment(
    "autoencoder-scale",
    "Larger autoencoders",
    "§7.3, “Scale”",
    "Twice the layers, twice the width, or 100 instead of 15 billion tokens bring no significant gain.",
    rows,
    BRIERS | RECONSTRUCTION,
    Figure(),
    claims,
    repeat=repeated_from_the_autoencoder_on,
)
