"""Chunk size K: score and cost."""

from calm.paper.experiment import BRIERS, Experiment, Figure, Lookup, Row
from calm.paper.experiments.main import PAPER
from calm.paper.measures import cost, scores
from calm.paper.scales import CHUNK_SIZES, Scale
from calm.paper.values import Table, Verdict

STRIDE = max(CHUNK_SIZES)  # so that all models are scored at the same positions


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    table_rows = [
        Row(
            f"Transformer-{size}",
            (cost(run := scale.transformer(size)), scores(run, scale, stride=STRIDE)),
            {"brier_lm": reported},
            "Transformer",
        )
        for size, reported in PAPER["Transformer"].items()
    ]
    for size in CHUNK_SIZES:
        run = scale.calm(size="L", autoencoder=scale.autoencoder(chunk_size=size))
        measures = cost(run), scores(run, scale, stride=STRIDE)
        table_rows.append(
            Row(f"CALM-L, K = {size}", measures, {"brier_lm": PAPER["CALM"]["L"]} if size == 4 else {}, "CALM-L")
        )
    return table_rows


def claims(table: Table) -> list[Verdict]:
    return [
        table.better("the Transformer is better than CALM with K = 1", "Transformer-L", "CALM-L, K = 1"),
        table.better("K = 1 is better than K = 2 (paper: slightly)", "CALM-L, K = 1", "CALM-L, K = 2"),
        table.better("K = 4 is better than K = 8", "CALM-L, K = 4", "CALM-L, K = 8"),
    ]


EXPERIMENT = Experiment(
    "chunk-size",
    "Chunk size K",
    "figure “Effect of chunk size K”",
    "K = 1 is worse than a Transformer of equal cost. K = 2 halves the cost with little loss, K = 4 surpasses the "
    "Transformer's performance-compute frontier, and K = 8 loses more.",
    rows,
    {"train_flops": "training FLOPs"} | BRIERS,
    Figure("training FLOPs", x_column="train_flops", log_x=True),
    claims,
)
