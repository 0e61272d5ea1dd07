"""Generative heads during training: the three of the paper, mean flow, and the chain head."""

from calm.paper.experiment import BRIERS, TWO_SCORES, Experiment, Figure, Lookup, Row
from calm.paper.measures import scores
from calm.paper.runs import Run
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

HEADS = ("energy", "flow", "diffusion", "mean-flow", "chain")


def trained(scale: Scale, head: str) -> Run:
    """A run with the given head and a constant learning rate, as in the paper."""
    return scale.calm({"language_model.head": head}).until(1.0)


def _label(head: str, steps: int) -> str:
    return f"{head}, {steps:,} steps"


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    return [
        Row(
            _label(head, steps),
            (scores(run, scale),),
            {"brier_lm": 4.70} if head == "energy" and steps == trained(scale, head).steps else {},
            head,
            steps,
        )
        for head in HEADS
        for steps, run in scale.training_curve(trained(scale, head))
    ]


def claims(table: Table) -> list[Verdict]:
    first, last = ({head: table.series(head)[end].row.label for head in HEADS} for end in (0, -1))
    return [
        table.better("energy is better than diffusion at the end of training", last["energy"], last["diffusion"]),
        table.better("flow is better than diffusion at the end of training", last["flow"], last["diffusion"]),
        table.better("energy is better than flow at the end of training", last["energy"], last["flow"]),
        table.better("flow is better than energy at the start of training", first["flow"], first["energy"]),
        table.better(
            "not in the paper: mean flow is better than energy at the end of training",
            last["mean-flow"],
            last["energy"],
        ),
        table.better(
            "not in the paper: chain is better than energy at the end of training", last["chain"], last["energy"]
        ),
    ]


EXPERIMENT = Experiment(
    "heads",
    "Generative heads",
    "figure “BrierLM scores during training for different heads”",
    "Flow matching and energy outperform diffusion. Flow converges faster at first; energy reaches a higher score.",
    rows,
    BRIERS,
    Figure("training steps", TWO_SCORES),
    claims,
    note="The mean-flow and chain heads are not in the paper. The chain head is not likelihood-free.",
)
