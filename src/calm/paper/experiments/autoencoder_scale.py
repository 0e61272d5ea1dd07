"""Larger autoencoders, and more training data for them."""

from calm.paper.experiment import BRIERS, RECONSTRUCTION, Experiment, Figure, Lookup, Row
from calm.paper.measures import on_autoencoder, repeated_from_the_autoencoder_on
from calm.paper.runs import STEPS
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

MORE_DATA = 100 / 15  # billions of tokens


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    baseline = scale.autoencoder()
    shape = baseline.base_config.autoencoder
    layers = {f"autoencoder.num_{part}_layers": 4 for part in ("encoder", "decoder")}
    sizes = {f"autoencoder.{name}": 2 * getattr(shape, name) for name in ("hidden_size", "intermediate_size")}
    variants = {
        "baseline": {},
        "2× layers": layers,
        "2× width": sizes,
        "more data": {STEPS: round(MORE_DATA * baseline.steps)},
    }
    return [
        Row(label, on_autoencoder(baseline.with_settings(changes), scale), {} if changes else {"brier_lm": 4.70})
        for label, changes in variants.items()
    ]


def claims(table: Table) -> list[Verdict]:
    return [
        table.better(f"{label}: better than the baseline (paper: no)", label, "baseline")
        for label in list(table.lines)[1:]
    ]


EXPERIMENT = Experiment(
    "autoencoder-scale",
    "Larger autoencoders",
    "§7.3, “Scale”",
    "Twice the layers, twice the width, or 100 instead of 15 billion tokens give no significant gain.",
    rows,
    BRIERS | RECONSTRUCTION,
    Figure(),
    claims,
    repeat=repeated_from_the_autoencoder_on,
)
