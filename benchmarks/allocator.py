"""What keeping memory between steps brings (calm/allocator.py): processes with and without it take turns.

python benchmarks/allocator.py [RECIPE] [--rounds 3] [--steps 8]
"""

import argparse
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from calm.allocator import keep_memory
from calm.bench.models import Training, config_of


def step_time(recipe: str, keep: bool, steps: int) -> float:
    """The median of some steps in a new process."""
    if keep:
        keep_memory()
    training, times = Training(config_of(recipe, "laptop"), 4096), []
    for _ in range(steps + 1):
        began = time.perf_counter()
        training.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="laptop-calm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    ratios = []
    for _ in range(options.rounds):
        found = []
        for keep in (False, True):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
                found.append(apart.submit(step_time, options.recipe, keep, options.steps).result())
        ratios.append(found[0] / found[1])
        print(f"given back {1e3 * found[0]:.0f} ms, kept {1e3 * found[1]:.0f} ms a step", flush=True)
    print(f"{options.recipe}: kept memory makes steps {statistics.median(ratios):.2f} times as fast")


if __name__ == "__main__":
    main()
