"""Main results: Table 1, the chunk size, training curves, and BrierLM against cross-entropy."""

import statistics

import numpy as np

from calm.paper.cost import TABLE_1
from calm.paper.experiment import BRIERS, NO, UNDECIDED, YES, Experiment, Figure, Lookup, Row, Table, Verdict
from calm.paper.measures import cost, scores
from calm.paper.scales import CHUNK_SIZES, Scale

BRIER_LM = {  # reported in Table 1
    **{"Transformer-S": 6.05, "Transformer-M": 7.07, "Transformer-L": 8.98},
    **{"CALM-M": 5.72, "CALM-L": 6.58, "CALM-XL": 8.53},
}
CANDIDATES = 200
CORRELATION = {"Pearson": -0.966, "Spearman": -0.991}  # reported
STRONG = -0.9  # upper bound of a strong negative correlation
MIN_POINTS = 4


def main_rows(scale: Scale, lookup: Lookup) -> list[Row]:
    rows = []
    for label, brier_lm in BRIER_LM.items():
        kind, size = label.split("-")
        run = scale.calm(size=size) if kind == "CALM" else scale.transformer(size)
        costs = zip(("parameters", "train_flops", "inference_flops"), TABLE_1[f"paper-{label.lower()}"], strict=True)
        measures = cost(run, CANDIDATES), scores(run, scale)
        rows.append(Row(label, measures, {**dict(costs), "brier_lm": brier_lm}, kind))
    return rows


def main_claims(table: Table) -> list[Verdict]:
    calm, transformer = (table.lines[label].values["train_flops"].value or 0 for label in ("CALM-M", "Transformer-S"))
    comparable = f"CALM-M is better than Transformer-S at {calm / transformer:.2f} of its FLOPs (paper: comparable)"
    return [
        table.better("CALM improves with size: XL is better than L", "CALM-XL", "CALM-L"),
        table.better("CALM improves with size: L is better than M", "CALM-L", "CALM-M"),
        table.better(comparable, "CALM-M", "Transformer-S"),
    ]


def chunk_size_rows(scale: Scale, lookup: Lookup) -> list[Row]:
    runs = {f"Transformer-{size}": scale.transformer(size) for size in ("S", "M", "L")}
    for k in CHUNK_SIZES:
        runs[f"CALM-L, K = {k}"] = scale.calm(size="L", autoencoder=scale.autoencoder(chunk_size=k))
    paper = {**BRIER_LM, "CALM-L, K = 4": BRIER_LM["CALM-L"]}
    return [
        Row(
            label,
            (cost(run), scores(run, scale, stride=max(CHUNK_SIZES))),  # the same positions for all models
            {"brier_lm": paper[label]} if label in paper else {},
            "CALM-L" if run.autoencoder else "Transformer",
        )
        for label, run in runs.items()
    ]


def training_curve_rows(scale: Scale, lookup: Lookup) -> list[Row]:
    models = {f"Transformer-{size}": scale.transformer(size) for size in ("S", "M", "L")}
    models["CALM-XL"] = scale.calm(size="XL")
    return [
        Row(f"{name}, {steps:,} steps", (scores(run, scale),), {}, name, steps)
        for name, model in models.items()
        for steps, run in scale.training_curve(model)
    ]


def training_curve_claims(table: Table) -> list[Verdict]:
    calm, baseline = ([line.row.label for line in table.series(name)] for name in ("CALM-XL", "Transformer-M"))
    return [
        table.better("CALM-XL is worse than Transformer-M at the start of training", baseline[0], calm[0]),
        table.better("CALM-XL is better than Transformer-M at the end of training", calm[-1], baseline[-1]),
    ]


def correlations(nats: list[float], scores: list[float]) -> dict[str, float]:
    """Pearson and Spearman (rank) correlation coefficients."""
    ranks = (np.argsort(np.argsort(values)).tolist() for values in (nats, scores))
    return {"Pearson": statistics.correlation(nats, scores), "Spearman": statistics.correlation(*ranks)}


def correlation_claims(table: Table) -> list[Verdict]:
    defined = [line.values for line in table.lines.values() if line.values["brier_lm"].value is not None]
    count = f"{len(defined)} of {len(table.lines)} points have a defined BrierLM"
    if len(defined) < MIN_POINTS:
        return [Verdict("BrierLM correlates with cross-entropy", UNDECIDED, count)]
    points = ([values[name].bounds[1] for values in defined] for name in ("cross_entropy", "brier_lm"))
    return [
        Verdict(
            f"the {name} correlation is strong",
            YES if value < STRONG else NO,
            f"{value:.3f} (paper: {CORRELATION[name]}); {count}",
        )
        for name, value in correlations(*points).items()
    ]


EXPERIMENTS = (
    Experiment(
        name="main",
        title="Model sizes, compute cost and BrierLM",
        source="Table 1",
        finding="CALM-M is comparable to Transformer-S with 44% fewer training and 34% fewer inference FLOPs. CALM "
        "improves with size.",
        rows=main_rows,
        claims=main_claims,
        columns={
            "parameters": "parameters",
            "train_flops": "training FLOPs",
            "inference_flops": "inference FLOPs per token",
            "inference_flops_with_candidates": f"with N = {CANDIDATES} candidates",
            "inference_flops_with_search": "with exact vocabulary search",
            **BRIERS,
        },
        figure=Figure("training FLOPs", x_column="train_flops", log_x=True),
        note=f"Not in the paper: inference FLOPs per token at low temperature, with {CANDIDATES} candidates per chunk. "
        "Each candidate computes the logits of the full vocabulary, or uses the exact vocabulary search (in int8, "
        "counted as a quarter; small vocabularies are not searched).",
    ),
    Experiment(
        name="chunk-size",
        title="Chunk size K",
        source="figure “Effect of chunk size K”",
        finding="K = 1 is worse than a Transformer of equal cost. K = 2 halves the cost with little loss, K = 4 "
        "surpasses the Transformer's performance-compute frontier, and K = 8 loses more.",
        rows=chunk_size_rows,
        claims=lambda table: [
            table.better("the Transformer is better than CALM with K = 1", "Transformer-L", "CALM-L, K = 1"),
            table.better("K = 1 is better than K = 2 (paper: slightly)", "CALM-L, K = 1", "CALM-L, K = 2"),
            table.better("K = 4 is better than K = 8", "CALM-L, K = 4", "CALM-L, K = 8"),
        ],
        columns={"train_flops": "training FLOPs", **BRIERS},
        figure=Figure("training FLOPs", x_column="train_flops", log_x=True),
    ),
    Experiment(
        name="training-curves",
        title="BrierLM during training",
        source="figure “Training progress”",
        finding="Transformers improve fast and saturate. CALM-XL starts below Transformer-M and approaches "
        "Transformer-L.",
        rows=training_curve_rows,
        claims=training_curve_claims,
        figure=Figure("training steps"),
    ),
    Experiment(
        name="brier-correlation",
        title="BrierLM vs. cross-entropy",
        source="figure “Joint distribution of cross-entropy and BrierLM”",
        finding="The correlation coefficients are -0.966 (Pearson) and -0.991 (Spearman).",
        rows=lambda scale, _: [
            Row(f"Transformer-{size}, {steps:,} steps", (scores(run, scale, stride=1),), {}, f"Transformer-{size}")
            for size in ("S", "M", "L")
            for steps, run in scale.training_curve(scale.transformer(size))
        ],
        claims=correlation_claims,
        columns={"cross_entropy": "cross-entropy (nats per token)", **BRIERS},
        figure=Figure("cross-entropy (nats per token)", x_column="cross_entropy", annotate=False),
        repeat=None,
    ),
)
