"""How many steps the flow and the diffusion head need to draw a latent."""

from typing import Any

from calm.paper.experiment import BRIERS, TWO_SCORES, Experiment, Figure, Known, Row
from calm.paper.experiments.heads import trained
from calm.paper.measures import scores
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

STEPS = {"euler": (1, 2, 4, 8, 16, 32), "midpoint": (1, 2, 4, 8, 16), "diffusion": (4, 10, 25, 50, 100)}


def _label(sampler: str, steps: int) -> str:
    return f"{sampler}, {steps}"


def rows(scale: Scale, known: Known) -> list[Row]:
    found = []
    for sampler, numbers in STEPS.items():
        run = trained(scale, "diffusion" if sampler == "diffusion" else "flow")
        kind: dict[str, Any] = {} if sampler == "diffusion" else {"sampler": sampler}
        for steps in numbers:
            wanted = scores(run, scale, num_sampling_steps=steps, **kind)
            found.append(Row(_label(sampler, steps), (wanted,), {}, sampler, steps))
    energy = scores(trained(scale, "energy"), scale)
    return [*found, Row("energy, 1", (energy,), {}, "energy", 1)]


def claims(table: Table) -> list[Verdict]:
    return [
        table.better(
            "diffusion needs many steps: 100 are better than 10", _label("diffusion", 100), _label("diffusion", 10)
        ),
        table.better("2 midpoint steps are better than 4 Euler steps", _label("midpoint", 2), _label("euler", 4)),
        table.better(
            "16 midpoint steps are better than 4 (the paper: hardly)", _label("midpoint", 16), _label("midpoint", 4)
        ),
        table.better("energy in one step is better than 16 midpoint steps", "energy, 1", _label("midpoint", 16)),
    ]


EXPERIMENT = Experiment(
    "sampling-steps",
    "Steps of sampling",
    "figure “Effect of sampling steps”",
    "Diffusion needs many steps, the midpoint sampler two to four; the energy head needs one and is better.",
    rows,
    BRIERS,
    Figure(
        "steps of sampling (a midpoint step calls the network twice)",
        TWO_SCORES,
        log_x=True,
    ),
    claims,
)
