"""Products with few rows (calm.products), a cache with room and steps in C (calm.sampling) against plain ones.

    python benchmarks/few_rows.py                    products of CALM-M's shapes, then steps of a laptop model
    python benchmarks/few_rows.py --size paper       the same, with steps of CALM-M with 128,257 words
    python benchmarks/few_rows.py --context 2000     behind so many chunks

Bytes are those of the matrix: what is read, however many rows meet it. All ways take turns.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from calm import native
from calm.bench import generation
from calm.bench.clock import ratios, take_turns
from calm.bench.generation import STEPS, reading
from calm.bench.models import RECIPES, VOCABULARIES, config_of, model_of
from calm.linear import FastLinear, change_layers
from calm.products import FewRows, long_product
from calm.sampling import predictor

SHAPES = {"(1024, 2752)": (2752, 1024), "(2752, 1024)": (1024, 2752), "(1024, 1024)": (1024, 1024)}  # of CALM-M
WORDS = {"(512, 128257)": (128_257, 512)}
ROWS = (1, 2, 3, 4, 8, 16, 32, 64)
ENOUGH = 2**26  # numbers that no cache holds
BATCHES = (1, 2, 4, 8, 16)
Product = Callable[[Tensor, Tensor], Tensor]


def products(shapes: dict[str, tuple[int, int]], product: Product, rounds: int) -> None:
    for name, (outputs, inputs) in shapes.items():
        matrices = [torch.randn(outputs, inputs) for _ in range(-(-ENOUGH // (outputs * inputs)))]
        for count in ROWS:
            rows = torch.randn(count, inputs)
            ways: dict[str, Callable[[], object]] = {
                "ours": every(matrices, lambda matrix, rows=rows: product(rows, matrix)),
                "F.linear": every(matrices, lambda matrix, rows=rows: F.linear(rows, matrix)),
                "reading": every(matrices, torch.sum),
            }
            times = take_turns(ways, rounds)
            length = 4e-9 * len(matrices) * outputs * inputs
            speeds = [f"{way} {length / statistics.median(seconds):5.1f} GB/s" for way, seconds in times.items()]
            gain = statistics.median(ratios(times["F.linear"], times["ours"]))
            print(f"{name:15} {count:3} rows: {', '.join(speeds)}, {gain:.2f} times as fast")


def every(matrices: list[Tensor], way: Callable[[Tensor], object]) -> Callable[[], object]:
    return lambda: [way(matrix) for matrix in matrices]


without_c = mock.patch.object(native, "library", return_value=None)


def steps(size: str, context: int, rounds: int) -> None:
    """Steps of texts that go on: ours, ours without native.c, and with torch's layers and transformers' cache."""
    for kind, recipe in RECIPES[size].items():
        if kind == "Transformer":
            continue
        settings = f"language_model.backbone.max_position_embeddings={context + 200}"
        model = model_of(config_of(recipe, size, settings), VOCABULARIES[size]).eval()
        ids = torch.randint(3, 4096, (1, context * model.config.chunk_size))
        for count in BATCHES if context < 100 else (1,):
            ours = generation.steps(model, ids.expand(count, -1), rounds)
            with without_c:
                by_torch = generation.steps(copy.deepcopy(model), ids.expand(count, -1), rounds)
            with (
                mock.patch.object(predictor, "transformers_cache", DynamicCache),
                mock.patch.object(predictor, "takes_steps", return_value=False),
            ):
                plain = generation.steps(model, ids.expand(count, -1), rounds)

            ways = {
                "ours": with_layers(model, FastLinear, ours),
                "without C": within(without_c, by_torch),
                "plain": with_layers(model, nn.Linear, plain),
                "reading": reading(model),
            }
            times = take_turns(ways, rounds)
            shown = [f"{name} {1e3 * statistics.median(seconds) / STEPS:.1f} ms" for name, seconds in times.items()]
            gains = [f"{spread(ratios(times[way], times['ours']))} of {way}" for way in ("without C", "plain")]
            share = spread(ratios(times["reading"], times["ours"]))
            print(f"{recipe}, {count} texts of {context} chunks: {', '.join(shown)}")
            print(f"    times the speed {', '.join(gains)}; share of the bound {share}")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def within(context: Any, run: Callable[[], object]) -> Callable[[], object]:
    def way() -> object:
        with context:
            return run()

    return way


def with_layers(model: nn.Module, kind: type[nn.Linear], run: Callable[[], object]) -> Callable[[], object]:
    def way() -> object:
        change_layers(model, kind)
        return run()

    return way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(RECIPES), default="laptop")
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only-steps", action="store_true")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    if not given.only_steps:
        products(SHAPES, lambda rows, matrix: FewRows(matrix)(rows), given.rounds)
        products(WORDS, long_product, given.rounds)
    steps(given.size, given.context, given.rounds)


if __name__ == "__main__":
    main()
