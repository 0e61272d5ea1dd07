"""Training steps with matrix products by oneDNN (calm.cpu.onednn) compared with torch's default, MKL.

    python benchmarks/layers.py                      the laptop recipes
    python benchmarks/layers.py laptop-autoencoder   other recipes

Each recipe is trained with and without `calm.cpu.optimize(model, training=True)`; the steps run in turn. On CPUs
without AVX-512, where oneDNN is not used, both are the same.
"""

import argparse
import os
import statistics
from unittest import mock

from calm import cpu
from calm.bench.clock import ratios, take_turns
from calm.bench.matmuls import Products
from calm.bench.models import RECIPES, VOCABULARIES, Training, config_of
from calm.cpu import onednn
from calm.cpu.allocator import keep_memory

FAST, PLAIN, MATMULS = "optimized", "torch", "matmuls"


def make_training(recipe: str, optimized: bool) -> Training:
    """A model with or without the CPU backend; `Training` calls `optimize`, unless the backend is switched off."""
    with mock.patch.dict(os.environ, {cpu.SWITCH: "1" if optimized else "0"}):
        return Training(config_of(recipe, "laptop"), VOCABULARIES["laptop"])


def compare(recipe: str, rounds: int) -> None:
    steps = {FAST: make_training(recipe, True).step, PLAIN: make_training(recipe, False).step}
    for step in steps.values():
        step()  # allocates the optimizer state, which is not part of a step
    times = take_turns({**steps, MATMULS: Products(steps[PLAIN]).run}, rounds)
    speedups = ratios(times[PLAIN], times[FAST])
    shares = [f"{name} {statistics.median(ratios(times[MATMULS], times[name])):.3f}" for name in steps]
    print(
        f"{recipe}: speedup {statistics.median(speedups):.3f}x ({min(speedups):.2f} to {max(speedups):.2f}); "
        f"matmul-only time with torch kernels / step time: {', '.join(shares)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES["laptop"].values()))
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    keep_memory()  # for both
    print(f"matrix products of the optimized models: {'torch' if onednn.product() is None else 'oneDNN'}")
    for recipe in args.recipes:
        compare(recipe, args.rounds)


if __name__ == "__main__":
    main()
