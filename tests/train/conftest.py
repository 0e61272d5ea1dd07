import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from calm.config import load_config
from calm.train.loop import train

RECIPE = {
    "data": {"chunk_size": 4, "sequence_length": 28, "batch_size": 4},
    "autoencoder": {"latent_size": 8, "hidden_size": 24, "intermediate_size": 32, "vocabulary_sample": 20},
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 5, "schedule": "linear"},
    "train": {
        "steps": 30,
        "log_every": 1,
        "evaluate_every": 10,
        "evaluation_batches": 2,
        "checkpoint_every": 10,
        "tensorboard": False,
    },
}


@pytest.fixture
def recipe(prepared, tmp_path) -> Path:
    """A tiny autoencoder on the tiny corpus, as a recipe file."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "data": {**RECIPE["data"], "sets": [{"path": str(prepared)}]}}))
    return path


@pytest.fixture(scope="session")
def autoencoder(prepared, tmp_path_factory) -> Path:
    """The model directory of a tiny autoencoder, trained for a few steps."""
    directory = tmp_path_factory.mktemp("autoencoder")
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "data": {**RECIPE["data"], "sets": [{"path": str(prepared)}]}}))
    train(load_config(str(path)), directory / "run")
    return directory / "run" / "model"


BACKBONE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def language_model(prepared, autoencoder, tmp_path) -> Path:
    """A tiny language model on that autoencoder, as a recipe file."""
    path = tmp_path / "language-model.yaml"
    values = {
        **RECIPE,
        "stage": "language-model",
        "data": {**RECIPE["data"], "sets": [{"path": str(prepared)}]},
        "language_model": {
            "autoencoder": str(autoencoder),
            "backbone": BACKBONE,
            "num_head_layers": 1,
            "noise_size": 8,
        },
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def transformer(prepared, tmp_path) -> Path:
    """The baseline in that size, as a recipe file."""
    path = tmp_path / "transformer.yaml"
    data = {**RECIPE["data"], "chunk_size": 1, "sets": [{"path": str(prepared)}]}
    values = {**RECIPE, "stage": "transformer", "data": data, "language_model": {"backbone": BACKBONE}}
    path.write_text(yaml.safe_dump(values))
    return path


def command(recipe, output, *more, processes=1) -> list[str]:
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    return [*start, "calm", "train", str(recipe), "--output", str(output), *map(str, more)]


def run(recipe, output, *more, processes=1) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(recipe, output, *more, processes=processes), capture_output=True, text=True, timeout=300
    )


def metrics(output, key="loss") -> dict[int, float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}
