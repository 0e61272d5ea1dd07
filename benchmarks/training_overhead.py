"""What the training engine adds to a step: `calm train` against a bare loop with the same model, data in memory.

    python benchmarks/training_overhead.py [--steps 60] [--rounds 5]

The model is that of the recipe laptop-autoencoder, on the embedded corpus. Both sides take turns in one
process; the medians over rounds are compared.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from calm.config import load_config
from calm.data.prepare import prepare
from calm.data.workers import PrepareOptions
from calm.noise import RowNoise
from calm.train.distributed import Processes
from calm.train.loop import train
from calm.train.optimizer import adamw
from calm.train.stages import AutoencoderStage
from calm.train.tracking import read_metrics


def engine(config, steps: int, folder: Path) -> float:
    """Seconds a step, by the clock times in metrics.jsonl, the first steps left out."""
    shutil.rmtree(folder, ignore_errors=True)
    train(config, folder)
    times = {line["step"]: line["time"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line}
    return (times[steps] - times[10]) / (steps - 10)


def bare(config, steps: int) -> float:
    torch.manual_seed(config.seed)
    stage = AutoencoderStage(config, Processes(0, 1, torch.device("cpu")))
    model, optimizer = stage.model.train(), adamw(stage.model, (0.9, 0.95), 1e-8, 0.1)
    batches = [stage.parts(stage.read(step))[0] for step in range(steps)]
    began = 0.0
    for step, batch in enumerate(batches):
        if step == 10:
            began = time.perf_counter()
        noise = RowNoise([step * len(batch["input_ids"]) + row for row in range(len(batch["input_ids"]))])
        loss = model(batch["input_ids"], batch["attention_mask"], noise, batch["candidates"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / (steps - 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), arguments.steps, arguments.rounds)


def compare(folder: Path, steps: int, rounds: int) -> None:
    prepare(["embedded"], folder / "data", PrepareOptions("bpe:4096", validation_share=0.05), workers=1)
    never = 10**9
    settings = {
        "data.sets.0.path": folder / "data",
        "train.steps": steps,
        "train.evaluate_every": never,
        "train.checkpoint_every": never,
        "train.evaluation_batches": 1,
    }
    config = load_config("laptop-autoencoder", [f"{key}={value}" for key, value in settings.items()])
    ratios = []
    for number in range(rounds):
        ours, plain = engine(config, steps, folder / "run"), bare(config, steps)
        ratios.append(ours / plain)
        print(f"round {number}: engine {1000 * ours:.1f} ms, bare loop {1000 * plain:.1f} ms a step", flush=True)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"engine / bare loop: median {statistics.median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
