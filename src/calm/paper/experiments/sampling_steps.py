"""Number of sampling steps of the flow and diffusion heads."""

from typing import Any

from calm.paper.experiment import BRIERS, TWO_SCORES, Experiment, Figure, Lookup, Row
from calm.paper.experiments.heads import trained
from calm.paper.measures import scores
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

STEPS = {"euler": (1, 2, 4, 8, 16, 32), "midpoint": (1, 2, 4, 8, 16), "diffusion": (4, 10, 25, 50, 100)}


def _label(sampler: str, steps: int) -> str:
    return f"{sampler}, {steps}"


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    table_rows = []
    for sampler, numbers in STEPS.items():
        run = trained(scale, "diffusion" if sampler == "diffusion" else "flow")
        options: dict[str, Any] = {} if sampler == "diffusion" else {"sampler": sampler}
        for steps in numbers:
            measure = scores(run, scale, num_sampling_steps=steps, **options)
            table_rows.append(Row(_label(sampler, steps), (measure,), {}, sampler, steps))
    energy = scores(trained(scale, "energy"), scale)
    return [*table_rows, Row("energy, 1", (energy,), {}, "energy", 1)]


def claims(table: Table) -> list[Verdict]:
    return [
        table.better(
            "diffusion needs many steps: 100 are better than 10", _label("diffusion", 100), _label("diffusion", 10)
        ),
        table.better("2 midpoint steps are better than 4 Euler steps", _label("midpoint", 2), _label("euler", 4)),
        table.better(
            "16 midpoint steps are better than 4 (paper: barely)", _label("midpoint", 16), _label("midpoint", 4)
        ),
        table.better(
            "one step of the energy head is better than 16 midpoint steps", "energy, 1", _label("midpoint", 16)
        ),
    ]


EXPERIMENT = Experiment(
    "sampling-steps",
    "Sampling steps",
    "figure “Effect of sampling steps”",
    "Diffusion needs many steps, flow matching with the midpoint sampler two to four. The energy head needs one and is "
    "better.",
    rows,
    BRIERS,
    Figure(
        "sampling steps (a midpoint step evaluates the network twice)",
        TWO_SCORES,
        log_x=True,
    ),
    claims,
)
