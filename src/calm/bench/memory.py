"""Memory: the most that a process holds in training, against what `calm cost` predicts for it."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from calm.bench.clock import Row, row
from calm.bench.machine import Machine
from calm.bench.models import SETTINGS, SHORT
from calm.config import load_config
from calm.data.prepare import prepare
from calm.data.workers import PrepareOptions
from calm.errors import UserError
from calm.paper.cost import cost_of
from calm.train.loop import train

RECIPES = {  # the first of each is the autoencoder of the others
    "laptop": ("laptop-autoencoder", "laptop-calm", "quickstart-calm", "laptop-transformer"),
    "paper": ("paper-autoencoder-k4", "paper-calm-m", "paper-transformer-s"),
}
FITTING = {  # what these cores can train, on a text that lies there
    "laptop": ("train.steps=12", "train.checkpoint_every=6"),
    "paper": (*SETTINGS, *SHORT["paper"], "train.steps=3", "train.checkpoint_every=1"),
}
WARM_UP = "toy-autoencoder"
STATUS = Path("/proc/self/status")


def measure(size: str, rounds: int, machine: Machine) -> Iterator[Row]:
    """Each recipe is trained for some steps on the embedded text, checkpoint included, in a process of its own."""
    if not STATUS.exists():
        raise UserError("memory is read from /proc, which this system does not have")
    with tempfile.TemporaryDirectory() as folder:
        data, runs = Path(folder) / "data", Path(folder) / "runs"
        prepare(["embedded"], data, PrepareOptions("bpe:4096", validation_share=0.05), workers=1)
        for recipe in RECIPES[size]:
            settings = [f"data.sets.0.path={data}", "train.evaluation_batches=1", *FITTING[size]]
            if load_config(recipe).stage == "language-model":
                settings.append(f"language_model.autoencoder={runs / RECIPES[size][0] / 'model'}")
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
                held = apart.submit(most_held, recipe, settings, str(runs / recipe)).result()
            predicted = cost_of(recipe, load_config(recipe, settings)).peak_memory
            yield row(f"{recipe}: most memory of a step", [held / 1e6], "MB")
            yield row(f"{recipe}: as calm cost predicts", [predicted / 1e6], "MB")
            yield row(f"{recipe}: measured over predicted", [held / predicted], "")


def most_held(recipe: str, settings: list[str], output: str) -> float:
    """Bytes that a training adds to a process which has trained before: libraries take theirs at the first step."""
    data = next(setting for setting in settings if setting.startswith("data.sets.0.path"))
    train(load_config(WARM_UP, [data, "train.steps=2", "train.evaluation_batches=1"]), f"{output}-warm-up")
    before = _bytes("VmRSS")
    train(load_config(recipe, settings), output)
    return _bytes("VmHWM") - before


def _bytes(field: str) -> float:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(field)]
    return 1024.0 * int(line.split()[1])
