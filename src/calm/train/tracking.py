"""Experiment tracking: metrics.jsonl, TensorBoard, optional Weights & Biases, and a plot of the loss."""

import json
import math
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from calm.errors import ConfigError
from calm.files import write_atomic

METRICS = "metrics.jsonl"


class Tracker:
    """Logs metrics on the main process and does nothing on the others. Write errors are reported once and ignored."""

    def __init__(
        self,
        directory: Path,
        *,
        is_main: bool,
        step: int,
        tensorboard: bool,
        wandb: bool,
        config: dict[str, Any],
        warn: Callable[[str], None],
    ):
        self.warn, self.warned = warn, False
        self.file: IO[str] | None = None
        self.board: Any = None
        self.wandb: Any = None
        if not is_main:
            return
        _truncate_metrics(directory / METRICS, step)
        self.file = (directory / METRICS).open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(directory / "tensorboard"), purge_step=step)
        if wandb:
            self.wandb = _wandb(directory, config)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self.file is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
            self.file.flush()
            for name, value in metrics.items() if self.board else []:
                self.board.add_scalar(name, value, step)
        except OSError as error:
            if not self.warned:
                self.warn(f"metrics cannot be written ({error.strerror or error}); training continues")
            self.warned = True
        if self.wandb:
            self.wandb.log(metrics, step=step)

    def close(self) -> None:
        with suppress(OSError):
            if self.file:
                self.file.close()
            if self.board:
                self.board.close()
        if self.wandb:
            self.wandb.finish()


def _wandb(directory: Path, config: dict[str, Any]) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "train.wandb is set but wandb is not installed; run pip install wandb, or set train.wandb=false"
        ) from error
    id_file = directory / "wandb-id"  # a resumed run continues the same wandb run
    if not id_file.exists():
        write_atomic(id_file, uuid.uuid4().hex.encode())
    run = id_file.read_text()
    return wandb.init(project="calm", name=directory.name, dir=str(directory), config=config, resume="allow", id=run)


def _truncate_metrics(path: Path, step: int) -> None:
    """Remove the metrics of steps after `step`, which will be repeated, and damaged lines."""
    if path.exists():
        kept = [json.dumps(metrics) + "\n" for metrics in read_metrics(path) if metrics["step"] <= step]
        write_atomic(path, "".join(kept).encode())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without damaged lines."""
    metrics = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError, RecursionError):
            values = json.loads(line)
            if isinstance(values, dict) and type(values.get("step")) is int:
                metrics.append(values)
    return metrics


def plot_losses(directory: Path) -> None:
    """Plot the training loss and the validation score over steps to loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    metrics = read_metrics(directory / METRICS)
    losses = [(m["step"], m["loss"]) for m in metrics if m.get("loss") is not None]
    scores = [(m["step"], m["score"]) for m in metrics if "score" in m]
    figure, axis = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    if losses:
        axis.plot(*zip(*losses, strict=True), color="tab:blue", linewidth=1.2, label="training loss")
        smallest, largest = min(loss for _, loss in losses), max(loss for _, loss in losses)
        if 0 < 10 * smallest < largest:
            axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("training loss")
    axis.grid(alpha=0.3)
    lines = axis.get_lines()
    if scores:
        right = axis.twinx()
        right.plot(*zip(*scores, strict=True), color="tab:orange", marker="o", markersize=3, label="validation score")
        right.set_ylabel("validation score")
        lines = [*lines, *right.get_lines()]
    axis.legend(handles=lines, loc="center right")
    figure.savefig(directory / "loss.png", dpi=120)
    pyplot.close(figure)
