"""Steps of training with the layers of calm.linear against the same steps with torch's.

    python benchmarks/layers.py                      the laptop recipes
    python benchmarks/layers.py laptop-autoencoder   others

Both take turns; where oneDNN is not taken (calm.products.WIDE is false), both are the same.
"""

import argparse
import statistics

from torch import nn

from calm import products
from calm.allocator import keep_memory
from calm.bench.clock import ratios, take_turns
from calm.bench.matmuls import Products
from calm.bench.models import RECIPES, VOCABULARIES, Training, config_of
from calm.linear import FastLinear


def compare(recipe: str, rounds: int) -> None:
    kinds = {"fast": FastLinear, "torch's": nn.Linear}
    made = {name: Training(config_of(recipe, "laptop"), VOCABULARIES["laptop"], kind) for name, kind in kinds.items()}
    for training in made.values():
        training.step()
    ways = {name: training.step for name, training in made.items()}
    times = take_turns({**ways, "products": Products(ways["torch's"]).run}, rounds)
    gains = ratios(times["torch's"], times["fast"])
    shares = [f"{name} {statistics.median(ratios(times['products'], times[name])):.3f}" for name in ways]
    print(
        f"{recipe}: {statistics.median(gains):.3f} times as fast ({min(gains):.2f} to {max(gains):.2f}); "
        f"shares of a bare loop over torch's products: {', '.join(shares)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES["laptop"].values()))
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    keep_memory()
    print(f"products of many rows: {'oneDNN' if products.WIDE else 'as torch computes them'}")
    for recipe in given.recipes:
        compare(recipe, given.rounds)


if __name__ == "__main__":
    main()
