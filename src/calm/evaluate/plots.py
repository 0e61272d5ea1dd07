"""Plots of evaluation results."""

from pathlib import Path
from typing import Any

from calm.scores.brier import MAX_NGRAM


def plot_robustness(measures: dict[str, Any], path: Path) -> None:
    """Accuracy under noise beyond the posterior's own."""
    points = measures["robustness"]
    scales = [point["extra_noise"] for point in points]
    figure = _figure((6, 4))
    axis = figure.subplots()
    axis.plot(scales, [100 * p["token_accuracy"] for p in points], marker="o", label="tokens")
    chunks = [100 * p["chunk_accuracy"] for p in points]
    axis.plot(scales, chunks, marker="s", label=f"chunks of {measures['chunk_size']}")
    axis.axvline(measures["mean_sigma"], color="grey", linestyle=":", label="mean sigma of the posterior")
    xlabel = "standard deviation of extra noise on a posterior sample"
    axis.set(xlabel=xlabel, ylabel="reconstructed (%)", ylim=(0, 102))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)


def plot_scores(answer: dict[str, Any], path: Path) -> None:
    """Brier-1 to Brier-4 and BrierLM of every model, with 95% intervals."""
    figure = _figure((7, 4))
    axis = figure.subplots()
    names = [*(f"brier_{n}" for n in range(1, MAX_NGRAM + 1)), "brier_lm"]
    models = answer["models"]
    for number, (model, measures) in enumerate(models.items()):
        shift = 0.12 * (number - (len(models) - 1) / 2)
        known = [(x + shift, measures[name]) for x, name in enumerate(names) if measures[name]["value"] is not None]
        values = [score["value"] for _, score in known]
        errors = [[abs(_end(score, end) - score["value"]) for _, score in known] for end in ("low", "high")]
        axis.errorbar([x for x, _ in known], values, yerr=errors, fmt="o", capsize=3, label=model)
    axis.set_xticks(range(len(names)), [*(f"Brier-{n}" for n in range(1, MAX_NGRAM + 1)), "BrierLM"])
    axis.set_xlim(-0.5, len(names) - 0.5)
    axis.axvline(MAX_NGRAM - 0.5, color="grey", linewidth=0.8)
    scores = [measures[name] for measures in models.values() for name in names]
    if all(score["value"] is None or (score["value"] > 0 and _end(score, "low") > 0) for score in scores):
        axis.set_yscale("log")
    axis.set_ylabel("score (percent), with 95% interval")
    axis.grid(alpha=0.3, axis="y")
    axis.legend()
    figure.savefig(path, dpi=120)


def _end(score: dict[str, Any], end: str) -> float:
    """An end of the interval; where there is none, the value itself."""
    return score["value"] if score[end] is None else score[end]


def _figure(size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")
