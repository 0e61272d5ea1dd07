"""Overhead of `calm train` over a minimal training loop with the same model and batches in memory.

    python benchmarks/training_overhead.py [--steps 80] [--rounds 9]

The model is that of the recipe laptop-autoencoder, on the embedded corpus. Both run in turn in one process; each round
compares the medians of their step times.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from calm.config import RunConfig, load_config
from calm.data.prepare import prepare
from calm.data.workers import PrepareOptions
from calm.distributed import World
from calm.train.loop import optimize_for_cpu, train
from calm.train.optimizer import adamw
from calm.train.stages import AutoencoderStage
from calm.train.tracking import read_metrics

WARM_UP_STEPS = 10
NEVER = 10**9


def calm_train(config: RunConfig, folder: Path) -> list[float]:
    """Seconds per step, from the logged throughput. Logging at every step is included, and costs a little."""
    shutil.rmtree(folder, ignore_errors=True)
    train(config, folder)
    lines = read_metrics(folder / "metrics.jsonl")
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    tokens = config.data.batch_size * (config.data.sequence_length + config.data.chunk_size)
    return [tokens / speed for speed in speeds[WARM_UP_STEPS:]]


def minimal_loop(config: RunConfig) -> list[float]:
    """Seconds per step of a minimal loop for the same model; batches are made beforehand."""
    torch.manual_seed(config.seed)
    stage = AutoencoderStage(config, World(0, 1, torch.device("cpu")))
    stage.initialize()
    model = stage.model.train()
    optimize_for_cpu(model)
    optimizer = adamw(model, (0.9, 0.95), 1e-8, 0.1)
    seconds = []
    for inputs in [stage.micro_batches(stage.read(step))[0] for step in range(config.train.steps)]:
        began = time.perf_counter()
        model(**inputs)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP_STEPS:]


def compare(folder: Path, steps: int, rounds: int) -> None:
    prepare(["embedded"], folder / "data", PrepareOptions("bpe:4096", validation_share=0.05), workers=1)
    settings = {
        "data.sets.0.path": folder / "data",
        "train.steps": steps,
        "train.evaluate_every": NEVER,
        "train.checkpoint_every": NEVER,
        "train.evaluation_batches": 1,
        "train.log_every": 1,
    }
    config = load_config("laptop-autoencoder", [f"{key}={value}" for key, value in settings.items()])
    ratios = []
    for number in range(rounds):
        engine = statistics.median(calm_train(config, folder / "run"))
        minimal = statistics.median(minimal_loop(config))
        ratios.append(engine / minimal)
        times = f"calm train {1000 * engine:.1f} ms, minimal loop {1000 * minimal:.1f} ms"
        print(f"round {number}: {times} per step", flush=True)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"step time of calm train / minimal loop: median {statistics.median(ratios):.3f} ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help=f"per run, of which {WARM_UP_STEPS} are warm-up")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be larger than {WARM_UP_STEPS}, the number of warm-up steps")
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), args.steps, args.rounds)


if __name__ == "__main__":
    main()
