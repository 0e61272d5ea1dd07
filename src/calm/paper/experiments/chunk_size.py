"""The chunk size K against cost."""

from calm.paper.experiment import BRIERS, Experiment, Figure, Known, Row
from calm.paper.experiments.main import PAPER
from calm.paper.measures import cost, scores
from calm.paper.scales import CHUNK_SIZES, Scale
from calm.paper.values import Table, Verdict

STRIDE = max(CHUNK_SIZES)  # positions that all have in common


def rows(scale: Scale, known: Known) -> list[Row]:
    found = [
        Row(
            f"Transformer-{size}",
            (cost(run := scale.transformer(size)), scores(run, scale, stride=STRIDE)),
            {"brier_lm": printed},
            "Transformer",
        )
        for size, printed in PAPER["Transformer"].items()
    ]
    for size in CHUNK_SIZES:
        run = scale.calm(size="L", autoencoder=scale.autoencoder(chunk_size=size))
        measures = cost(run), scores(run, scale, stride=STRIDE)
        found.append(
            Row(f"CALM-L, K = {size}", measures, {"brier_lm": PAPER["CALM"]["L"]} if size == 4 else {}, "CALM-L")
        )
    return found


def claims(table: Table) -> list[Verdict]:
    return [
        table.better("the Transformer is better than CALM with K = 1", "Transformer-L", "CALM-L, K = 1"),
        table.better("K = 1 is better than K = 2 (the paper: a little)", "CALM-L, K = 1", "CALM-L, K = 2"),
        table.better("K = 4 is better than K = 8", "CALM-L, K = 4", "CALM-L, K = 8"),
    ]


EXPERIMENT = Experiment(
    "chunk-size",
    "Chunk size K",
    "figure “Effect of chunk size K”",
    "K = 1 is worse than a Transformer of its cost, K = 2 halves the cost at little loss, K = 4 is beyond the "
    "Transformer's frontier, K = 8 loses more.",
    rows,
    {"train_flops": "training FLOPs"} | BRIERS,
    Figure("training FLOPs", over="train_flops", log_x=True),
    claims,
)
