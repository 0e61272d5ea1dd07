"""Generative heads over the course of training: the paper's three, and two of ours."""

from calm.paper.experiment import BRIERS, TWO_SCORES, Experiment, Figure, Known, Row
from calm.paper.measures import scores
from calm.paper.runs import Run
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

HEADS = ("energy", "flow", "diffusion", "mean-flow", "chain")


def trained(scale: Scale, head: str) -> Run:
    """A run of the head; its learning rate stays constant, as the paper's does."""
    return scale.calm({"language_model.head": head}).until(1.0)


def _label(head: str, steps: int) -> str:
    return f"{head}, {steps:,} steps"


def rows(scale: Scale, known: Known) -> list[Row]:
    return [
        Row(
            _label(head, steps),
            (scores(run, scale),),
            {"brier_lm": 4.70} if head == "energy" and steps == trained(scale, head).steps else {},
            head,
            steps,
        )
        for head in HEADS
        for steps, run in scale.along(trained(scale, head))
    ]


def claims(table: Table) -> list[Verdict]:
    first, last = ({head: table.series(head)[end].row.label for head in HEADS} for end in (0, -1))
    return [
        table.better("at the end energy is better than diffusion", last["energy"], last["diffusion"]),
        table.better("at the end flow is better than diffusion", last["flow"], last["diffusion"]),
        table.better("at the end energy is better than flow", last["energy"], last["flow"]),
        table.better("at the beginning flow is better than energy", first["flow"], first["energy"]),
        table.better("ours: at the end mean flow is better than energy", last["mean-flow"], last["energy"]),
        table.better("ours: at the end the chain is better than energy", last["chain"], last["energy"]),
    ]


EXPERIMENT = Experiment(
    "heads",
    "Generative heads",
    "figure “BrierLM scores during training for different heads”",
    "Flow matching and energy beat diffusion; flow is faster at first, energy reaches higher.",
    rows,
    BRIERS,
    Figure("steps of training", TWO_SCORES),
    claims,
    note="mean-flow and chain are not in the paper; the chain is not likelihood-free.",
)
