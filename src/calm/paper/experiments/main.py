"""Table 1: sizes, costs and BrierLM."""

from collections.abc import Iterator

from calm.paper.cost import TABLE_1
from calm.paper.experiment import BRIERS, Experiment, Figure, Known, Row
from calm.paper.measures import cost, scores
from calm.paper.runs import Run
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

PAPER = {"Transformer": {"S": 6.05, "M": 7.07, "L": 8.98}, "CALM": {"M": 5.72, "L": 6.58, "XL": 8.53}}
CANDIDATES = 200


def runs(scale: Scale) -> Iterator[tuple[str, str, Run]]:
    """(kind, size, run)."""
    for size in PAPER["Transformer"]:
        yield "Transformer", size, scale.transformer(size)
    for size in PAPER["CALM"]:
        yield "CALM", size, scale.calm(size=size)


def rows(scale: Scale, known: Known) -> list[Row]:
    found = []
    for kind, size, run in runs(scale):
        printed = TABLE_1[f"paper-{kind.lower()}-{size.lower()}"]
        columns = dict(zip(("parameters", "train_flops", "inference_flops"), printed, strict=True))
        measures = cost(run, CANDIDATES), scores(run, scale)
        found.append(Row(f"{kind}-{size}", measures, {**columns, "brier_lm": PAPER[kind][size]}, kind))
    return found


def claims(table: Table) -> list[Verdict]:
    flops = [table.lines[label].values["train_flops"].value or 0 for label in ("CALM-M", "Transformer-S")]
    return [
        table.better("CALM improves with size: XL is better than L", "CALM-XL", "CALM-L"),
        table.better("CALM improves with size: L is better than M", "CALM-L", "CALM-M"),
        table.better(
            f"CALM-M reaches Transformer-S, at {flops[0] / flops[1]:.2f} of its FLOPs", "CALM-M", "Transformer-S"
        ),
    ]


EXPERIMENT = Experiment(
    "main",
    "Sizes, costs and BrierLM",
    "Table 1",
    "CALM-M comes near Transformer-S with 44% fewer training and 34% fewer inference FLOPs; CALM improves with size.",
    rows,
    {
        "parameters": "parameters",
        "train_flops": "training FLOPs",
        "inference_flops": "FLOPs a token",
        "inference_flops_with_candidates": f"at N = {CANDIDATES}",
        "inference_flops_with_search": "with exact search",
    }
    | BRIERS,
    Figure("training FLOPs", over="train_flops", log_x=True),
    claims,
    note=f"What the paper leaves out: FLOPs a token at low temperature, with {CANDIDATES} candidates a chunk; all "
    "words computed for each, or found by the exact vocabulary search (in eight bits, which count a quarter; small "
    "vocabularies are read whole).",
)
