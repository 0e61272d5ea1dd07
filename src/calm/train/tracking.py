"""What a run leaves to look at: metrics.jsonl, TensorBoard, wandb when asked for, and a plot at the end."""

import json
import time
from pathlib import Path
from typing import Any

from calm.errors import ConfigError
from calm.files import write_atomic

METRICS = "metrics.jsonl"


class Tracker:
    """Writes metrics of the first process; in the others it does nothing."""

    def __init__(
        self, directory: Path, *, first: bool, step: int, tensorboard: bool, wandb: bool, config: dict[str, Any]
    ):
        self.writers: list[Any] = []
        self.file = None
        if not first:
            return
        keep_until(directory / METRICS, step)
        self.file = (directory / METRICS).open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            board = SummaryWriter(str(directory / "tensorboard"), purge_step=step)
            self.writers.append(lambda metrics, step: [board.add_scalar(k, v, step) for k, v in metrics.items()])
        if wandb:
            self.writers.append(_wandb(directory, config))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **metrics}) + "\n")
        self.file.flush()
        for write in self.writers:
            write(metrics, step)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _wandb(directory: Path, config: dict[str, Any]):
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("train.wandb is set but wandb is not installed; pip install wandb, or unset it") from error
    run = wandb.init(project="calm", dir=str(directory), config=config, resume="allow", id=directory.name)
    return lambda metrics, step: run.log(metrics, step=step)


def keep_until(path: Path, step: int) -> None:
    """Drop the lines of steps that will be done again, and a last line that a crash cut."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text("utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break
    write_atomic(path, "".join(kept).encode())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def plot_losses(directory: Path) -> None:
    """loss.png: the training loss over steps, and the score of each evaluation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    metrics = read_metrics(directory / METRICS)
    losses = [(m["step"], m["loss"]) for m in metrics if "loss" in m]
    scores = [(m["step"], m["score"]) for m in metrics if "score" in m]
    figure, axis = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    if losses:
        axis.plot(*zip(*losses, strict=True), color="tab:blue", linewidth=1.2, label="training loss")
        if min(loss for _, loss in losses) > 0:
            axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats a chunk)")
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
