"""What the training engine adds to a step: `calm train` against a bare loop with the same model, data in memory.

    python benchmarks/training_overhead.py [--steps 80] [--rounds 9]

The model is that of the recipe laptop-autoencoder, on the embedded corpus. Both sides take turns in one
process; the medians of their steps are compared, and the median over rounds is told.
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
from calm.distributed import World
from calm.train.loop import train
from calm.train.optimizer import adamw
from calm.train.stages import AutoencoderStage
from calm.train.tracking import read_metrics

WARM_UP = 10


def engine(config, folder: Path) -> list[float]:
    """Seconds of each step, from the speed that the engine logs; it logs every step here, which costs it a little."""
    shutil.rmtree(folder, ignore_errors=True)
    train(config, folder)
    speeds = [
        line["tokens_per_second"] for line in read_metrics(folder / "metrics.jsonl") if "tokens_per_second" in line
    ]
    tokens = config.data.batch_size * (config.data.sequence_length + config.data.chunk_size)
    return [tokens / speed for speed in speeds[WARM_UP:]]


def bare(config) -> list[float]:
    """Seconds of each step of the shortest loop that trains the same model, batches made before."""
    torch.manual_seed(config.seed)
    stage = AutoencoderStage(config, World(0, 1, torch.device("cpu")))
    model, optimizer = stage.model.train(), adamw(stage.model, (0.9, 0.95), 1e-8, 0.1)
    seconds = []
    for batch in [stage.parts(stage.read(step))[0] for step in range(config.train.steps)]:
        began = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=9)
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
        "train.log_every": 1,
    }
    config = load_config("laptop-autoencoder", [f"{key}={value}" for key, value in settings.items()])
    ratios = []
    for number in range(rounds):
        ours, plain = statistics.median(engine(config, folder / "run")), statistics.median(bare(config))
        ratios.append(ours / plain)
        print(f"round {number}: engine {1000 * ours:.1f} ms, bare loop {1000 * plain:.1f} ms a step", flush=True)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"engine / bare loop: median {statistics.median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
