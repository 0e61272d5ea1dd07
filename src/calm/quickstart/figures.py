"""The pictures of the report, as PNGs."""

import io
from pathlib import Path
from typing import Any

from calm.config import CONFIG_FILE, load_config
from calm.evaluate.report import plot_robustness, plot_scores
from calm.train.tracking import METRICS, read_metrics

COLOURS = {"calm": "tab:blue", "transformer": "tab:orange"}


def _png(draw: Any, size: tuple[float, float] = (7, 4)) -> bytes:
    """What `draw(axis)` draws."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots())
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def learning_curves(output: Path) -> bytes:
    """Brier-1 on validation text over the time of training."""

    def draw(axis: Any) -> None:
        for stage, colour in COLOURS.items():
            seconds, scores = curve(output / "runs" / stage)
            axis.plot([s / 60 for s in seconds], scores, "o-", color=colour, label=stage)
        axis.set(xlabel="minutes of training", ylabel="Brier-1 on validation text (percent)")
        axis.grid(alpha=0.3)
        axis.legend()

    return _png(draw)


def curve(run: Path) -> tuple[list[float], list[float]]:
    """Seconds of training, evaluations left out, and Brier-1 on validation text."""
    data = load_config(str(run / CONFIG_FILE)).data
    tokens, seconds, before, found = data.batch_size * data.sequence_length, 0.0, 0, ([], [])
    for line in read_metrics(run / METRICS):
        if line.get("tokens_per_second"):
            seconds += (line["step"] - before) * tokens / line["tokens_per_second"]
            before = line["step"]
        if "brier_1" in line:
            found[0].append(seconds)
            found[1].append(line["brier_1"])
    return found


def tradeoff(points: list[dict[str, Any]]) -> bytes:
    """Accuracy over collision of the first token, a curve a model."""

    def draw(axis: Any) -> None:
        for model, colour in COLOURS.items():
            mine = [point for point in points if point["model"] == model]
            at = {name: [point[name][0] for point in mine] for name in ("collision", "accuracy")}
            errors = [point["accuracy_error"][0] for point in mine]
            axis.errorbar(at["collision"], at["accuracy"], errors, fmt="o-", color=colour, capsize=3, label=model)
            for point, x, y in zip(mine, at["collision"], at["accuracy"], strict=True):
                axis.annotate(f"{point['temperature']:g}", (x, y), textcoords="offset points", xytext=(5, -11), size=8)
        axis.set(xlabel="collision of two samples (percent): less is more diverse", ylabel="accuracy (percent)")
        axis.grid(alpha=0.3)
        axis.legend(title="temperature beside a point")

    return _png(draw)


def from_file(plot: Any, measures: dict[str, Any], path: Path) -> bytes:
    plot(measures, path)
    return path.read_bytes()


def reconstruction(measures: dict[str, Any], output: Path) -> bytes:
    return from_file(plot_robustness, measures, output / "results" / "reconstruction.png")


def scores(answer: dict[str, Any], output: Path) -> bytes:
    return from_file(plot_scores, answer, output / "results" / "scores.png")
