"""Figures of the report, as PNG bytes."""

import io
from pathlib import Path
from typing import Any

from calm.config import CONFIG_FILE, load_config
from calm.evaluate.plots import plot_robustness, plot_scores
from calm.train.tracking import METRICS, read_metrics

COLOURS = {"calm": "tab:blue", "transformer": "tab:orange"}


def _png(draw: Any, size: tuple[float, float] = (7, 4)) -> bytes:
    """Render `draw(axis)` as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots())
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def learning_curves(output: Path) -> bytes:
    """Validation Brier-1 over training time."""

    def draw(axis: Any) -> None:
        for stage, colour in COLOURS.items():
            seconds, scores = curve(output / "runs" / stage)
            axis.plot([s / 60 for s in seconds], scores, "o-", color=colour, label=stage)
        axis.set(xlabel="training time (minutes)", ylabel="validation Brier-1 (percent)")
        axis.grid(alpha=0.3)
        axis.legend()

    return _png(draw)


def curve(run: Path) -> tuple[list[float], list[float]]:
    """Training time in seconds, excluding evaluations, and validation Brier-1, at each evaluation."""
    data = load_config(str(run / CONFIG_FILE)).data
    tokens_per_step = data.batch_size * data.sequence_length
    seconds, last_step, times, scores = 0.0, 0, [], []
    for line in read_metrics(run / METRICS):
        if line.get("tokens_per_second"):
            seconds += (line["step"] - last_step) * tokens_per_step / line["tokens_per_second"]
            last_step = line["step"]
        if "brier_1" in line:
            times.append(seconds)
            scores.append(line["brier_1"])
    return times, scores


def tradeoff(points: list[dict[str, Any]]) -> bytes:
    """Accuracy over collision of the first token, one curve per model."""

    def draw(axis: Any) -> None:
        for model, colour in COLOURS.items():
            selected = [point for point in points if point["model"] == model]
            values = {name: [point[name][0] for point in selected] for name in ("collision", "accuracy")}
            errors = [point["accuracy_error"][0] for point in selected]
            axis.errorbar(
                values["collision"], values["accuracy"], errors, fmt="o-", color=colour, capsize=3, label=model
            )
            for point, x, y in zip(selected, values["collision"], values["accuracy"], strict=True):
                axis.annotate(f"{point['temperature']:g}", (x, y), textcoords="offset points", xytext=(5, -11), size=8)
        axis.set(xlabel="collision of two samples (percent; lower is more diverse)", ylabel="accuracy (percent)")
        axis.grid(alpha=0.3)
        axis.legend(title="points labeled by temperature")

    return _png(draw)


def _from_file(plot: Any, measures: dict[str, Any], path: Path) -> bytes:
    """Run a plotting function that writes to `path`, and return the file's contents."""
    plot(measures, path)
    return path.read_bytes()


def reconstruction(measures: dict[str, Any], output: Path) -> bytes:
    return _from_file(plot_robustness, measures, output / "results" / "reconstruction.png")


def scores(answer: dict[str, Any], output: Path) -> bytes:
    return _from_file(plot_scores, answer, output / "results" / "scores.png")
