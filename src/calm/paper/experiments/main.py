"""Table 1: model sizes, compute cost and BrierLM."""

from collections.abc import Iterator

from calm.paper.cost import TABLE_1
from calm.paper.experiment import BRIERS, Experiment, Figure, Lookup, Row
from calm.paper.measures import cost, scores
from calm.paper.runs import Run
from calm.paper.scales import Scale
from calm.paper.values import Table, Verdict

PAPER = {"Transformer": {"S": 6.05, "M": 7.07, "L": 8.98}, "CALM": {"M": 5.72, "L": 6.58, "XL": 8.53}}
CANDIDATES = 200


def runs(scale: Scale) -> Iterator[tuple[str, str, Run]]:
    """Yields (kind, size, run) for each row of Table 1."""
    for size in PAPER["Transformer"]:
        yield "Transformer", size, scale.transformer(size)
    for size in PAPER["CALM"]:
        yield "CALM", size, scale.calm(size=size)


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    table_rows = []
    for kind, size, run in runs(scale):
        reported = TABLE_1[f"paper-{kind.lower()}-{size.lower()}"]
        columns = dict(zip(("parameters", "train_flops", "inference_flops"), reported, strict=True))
        measures = cost(run, CANDIDATES), scores(run, scale)
        table_rows.append(Row(f"{kind}-{size}", measures, {**columns, "brier_lm": PAPER[kind][size]}, kind))
    return table_rows


def claims(table: Table) -> list[Verdict]:
    flops = [table.lines[label].values["train_flops"].value or 0 for label in ("CALM-M", "Transformer-S")]
    return [
        table.better("CALM improves with size: XL is better than L", "CALM-XL", "CALM-L"),
        table.better("CALM improves with size: L is better than M", "CALM-L", "CALM-M"),
        table.better(
            f"CALM-M is better than Transformer-S at {flops[0] / flops[1]:.2f} of its FLOPs (paper: comparable)",
            "CALM-M",
            "Transformer-S",
        ),
    ]


EXPERIMENT = Experiment(
    "main",
    "Model sizes, compute cost and BrierLM",
    "Table 1",
    "CALM-M is comparable to Transformer-S with 44% fewer training and 34% fewer inference FLOPs. CALM improves with "
    "size.",
    rows,
    {
        "parameters": "parameters",
        "train_flops": "training FLOPs",
        "inference_flops": "inference FLOPs per token",
        "inference_flops_with_candidates": f"with N = {CANDIDATES} candidates",
        "inference_flops_with_search": "with exact vocabulary search",
    }
    | BRIERS,
    Figure("training FLOPs", x_column="train_flops", log_x=True),
    claims,
    note=f"Not in the paper: inference FLOPs per token at low temperature, with {CANDIDATES} candidates per chunk. "
    "Each candidate computes the logits of the full vocabulary, or uses the exact vocabulary search (in int8, counted "
    "as a quarter; small vocabularies are not searched).",
)
