"""Training step time with and without memory that is kept between steps (calm.cpu.allocator).

    python benchmarks/allocator.py [RECIPE] [--rounds 3] [--steps 8]

The setting applies to a whole process, so new processes with and without it run in turn.
"""

import argparse
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

from calm.bench.models import Training, config_of
from calm.cpu import allocator


def step_time(recipe: str, keep: bool, steps: int) -> float:
    """Median seconds per training step; call it in a new process."""
    if not keep:
        mock.patch.object(allocator, "keep_memory").start()
    training, times = Training(config_of(recipe, "laptop"), 4096), []
    for _ in range(steps + 1):
        began = time.perf_counter()
        training.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="laptop-calm")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of processes")
    parser.add_argument("--steps", type=int, default=8, help="training steps per process")
    args = parser.parse_args()
    speedups = []
    for _ in range(args.rounds):
        seconds = []
        for keep in (False, True):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                seconds.append(pool.submit(step_time, args.recipe, keep, args.steps).result())
        speedups.append(seconds[0] / seconds[1])
        print(f"memory released {1e3 * seconds[0]:.0f} ms, kept {1e3 * seconds[1]:.0f} ms per step", flush=True)
    print(f"{args.recipe}: speedup from keeping memory {statistics.median(speedups):.2f}x")


if __name__ == "__main__":
    main()
