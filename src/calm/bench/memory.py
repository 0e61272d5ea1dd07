"""Memory benchmark: peak memory of training, compared with the prediction of `calm cost`."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from calm.bench.clock import Row, row
from calm.bench.machine import Machine
from calm.bench.models import SETTINGS, SHORT, VOCABULARIES
from calm.config import load_config
from calm.data.prepare import prepare
from calm.data.shards import PreparedData
from calm.data.workers import PrepareOptions
from calm.errors import UserError
from calm.paper.cost import cost_of
from calm.train.loop import train

RECIPES = {  # the first recipe of each size trains the autoencoder of the others
    "laptop": ("laptop-autoencoder", "laptop-calm", "laptop-chain", "laptop-transformer"),
    "paper": ("paper-autoencoder-k4", "paper-calm-m", "paper-transformer-s"),
}
OVERRIDES = {  # short runs that a CPU can train on the embedded text
    "laptop": ("train.steps=12", "train.checkpoint_every=6"),
    "paper": (*SETTINGS, *SHORT["paper"], "train.steps=3", "train.checkpoint_every=1"),
}
WARM_UP = "toy-autoencoder"
STATUS = Path("/proc/self/status")


def measure(size: str, rounds: int, machine: Machine) -> Iterator[Row]:
    """Train each recipe for a few steps on the embedded text, with checkpoints, in a separate process."""
    if not STATUS.exists():
        raise UserError("calm bench memory reads /proc/self/status, which this system does not have; run it on Linux")
    with tempfile.TemporaryDirectory() as folder:
        data, runs = Path(folder) / "data", Path(folder) / "runs"
        _prepare(data, VOCABULARIES[size])
        for recipe in RECIPES[size]:
            settings = [f"data.sets.0.path={data}", "train.evaluation_batches=1", *OVERRIDES[size]]
            if load_config(recipe).stage == "language-model":
                settings.append(f"language_model.autoencoder={runs / RECIPES[size][0] / 'model'}")
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                peak = pool.submit(_peak_memory, recipe, settings, str(runs / recipe)).result()
            predicted = cost_of(recipe, load_config(recipe, settings)).peak_memory
            yield row(f"{recipe}: peak memory", [peak / 1e6], "MB")
            yield row(f"{recipe}: peak memory predicted by calm cost", [predicted / 1e6], "MB")
            yield row(f"{recipe}: measured / predicted", [peak / predicted], "")


def _prepare(data: Path, vocab_size: int) -> None:
    """Prepare the embedded text with a vocabulary of this size: 4,096 entries of a BPE, and unused ones."""
    options = PrepareOptions("bpe:4096", validation_share=0.05)
    small, wide = data.with_name("small"), data.with_name("tokenizer")
    prepare(["embedded"], small, options, workers=1)
    tokenizer = PreparedData(small).tokenizer
    tokenizer.backend.add_tokens([f"<unused {number}>" for number in range(vocab_size - tokenizer.vocab_size)])
    replace(tokenizer, content=tokenizer.backend.to_str()).save(wide)
    prepare(["embedded"], data, replace(options, tokenizer=str(wide)), workers=1)


def _peak_memory(recipe: str, settings: list[str], output: str) -> float:
    """Peak memory that a training run adds, in bytes.

    A short warm-up run excludes memory that libraries allocate once, at the first step.
    """
    data = next(setting for setting in settings if setting.startswith("data.sets.0.path"))
    train(load_config(WARM_UP, [data, "train.steps=2", "train.evaluation_batches=1"]), f"{output}-warm-up")
    before = _bytes("VmRSS")
    train(load_config(recipe, settings), output)
    return _bytes("VmHWM") - before


def _bytes(field: str) -> float:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(field)]
    return 1024.0 * int(line.split()[1])
