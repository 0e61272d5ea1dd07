"""GEMV, small-batch GEMM, and decoding steps: the CPU backend (calm.cpu) compared with torch.

    python benchmarks/small_batch.py                    linear layers of CALM-M, then decoding steps of laptop models
    python benchmarks/small_batch.py --size paper       the same, with decoding steps of CALM-M (128,257 tokens)
    python benchmarks/small_batch.py --context 2000     decoding after a prompt of 2,000 chunks
    python benchmarks/small_batch.py --only-steps       without the linear layers

Linear layers are memory-bound at these batch sizes: GB/s counts the bytes of the weight only, whatever the batch size.
Decoding steps use the native kernel; no native kernel (batched GEMM over slices of the weight, oneDNN); or torch alone,
as with CALM_CPU=0. All variants run in turn.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from calm import cpu
from calm.bench import generation
from calm.bench.clock import ratios, take_turns
from calm.bench.generation import PROMPT_VOCABULARY, STEPS
from calm.bench.models import RECIPES, VOCABULARIES, config_of, model_of
from calm.cpu import native
from calm.cpu.allocator import keep_memory
from calm.cpu.linear import small_batch_linear

WEIGHTS = [(2752, 1024), (1024, 2752), (1024, 1024), (128_257, 512)]  # (out, in) of CALM-M, and its vocabulary
BATCH_SIZES = (1, 2, 3, 4, 8, 16, 32, 64)
ELEMENTS = 2**26  # of all weights together; exceeds all caches
NUM_SEQUENCES = (1, 2, 4, 8, 16)
LONG_CONTEXT = 100  # chunks from which on only one sequence is decoded
NATIVE, NO_NATIVE, TORCH, READING = "native", "no native kernel", "torch", "weight reads"


def measure_linear(rounds: int, batch_sizes: list[int]) -> None:
    """`small_batch_linear` and `F.linear`, compared with reading the weights alone."""
    for out_features, in_features in WEIGHTS:
        weights = [torch.randn(out_features, in_features) for _ in range(-(-ELEMENTS // (out_features * in_features)))]
        gigabytes = 1e-9 * sum(weight.nbytes for weight in weights)
        for batch_size in batch_sizes:
            x = torch.randn(batch_size, in_features)
            functions = {
                "calm.cpu": _for_each(weights, lambda weight, x=x: small_batch_linear(x, weight)),
                "F.linear": _for_each(weights, lambda weight, x=x: F.linear(x, weight)),
                READING: _for_each(weights, torch.sum),
            }
            times = take_turns(functions, rounds)
            speeds = [f"{name} {gigabytes / statistics.median(times[name]):5.1f} GB/s" for name in functions]
            speedup = statistics.median(ratios(times["F.linear"], times["calm.cpu"]))
            shape = f"({out_features}, {in_features})"
            print(f"{shape:15} batch {batch_size:2}: {', '.join(speeds)}, speedup {speedup:.2f}x", flush=True)


def _for_each(weights: list[Tensor], function: Callable[[Tensor], object]) -> Callable[[], object]:
    return lambda: [function(weight) for weight in weights]


def no_native() -> AbstractContextManager[object]:
    return mock.patch.object(native, "library", return_value=None)


def cpu_off() -> AbstractContextManager[object]:
    return mock.patch.dict(os.environ, {cpu.SWITCH: "0"})


VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    NATIVE: nullcontext,
    NO_NATIVE: no_native,
    TORCH: cpu_off,
}


def measure_steps(size: str, context: int, rounds: int, num_sequences: list[int]) -> None:
    """Decoding steps of the variants, compared with each other and with reading the weights of a step."""
    for kind, recipe in RECIPES[size].items():
        if kind == "Transformer":
            continue
        positions = f"language_model.backbone.max_position_embeddings={context + 2 + STEPS * (rounds + 1)}"
        config = config_of(recipe, size, positions)
        # `optimize` replaces modules, so each variant has a model of its own; all have the same weights.
        models = {name: model_of(config, VOCABULARIES[size]).eval() for name in VARIANTS}
        prompt = torch.randint(3, PROMPT_VOCABULARY, (1, context * config.data.chunk_size))
        for count in num_sequences if context < LONG_CONTEXT else [1]:
            functions = {
                name: _steps(models[name], prompt.expand(count, -1), rounds, variant)
                for name, variant in VARIANTS.items()
            }
            functions[READING] = generation.reading(models[NATIVE])
            times = take_turns(functions, rounds)
            medians = [f"{name} {1e3 * statistics.median(times[name]) / STEPS:.1f} ms" for name in functions]
            speedups = [f"{_spread(ratios(times[name], times[NATIVE]))} over {name}" for name in (NO_NATIVE, TORCH)]
            share = _spread(ratios(times[READING], times[NATIVE]))
            print(f"{recipe}, batch size {count} after {context} chunks, time per step: {', '.join(medians)}")
            print(f"    speedup {', '.join(speedups)}; weight read time / step time {share}", flush=True)


def _steps(
    model: torch.nn.Module, ids: Tensor, rounds: int, variant: Callable[[], AbstractContextManager[object]]
) -> Callable[[], object]:
    with variant():
        run = generation.steps(model, ids, rounds)

    def steps() -> None:
        with variant():
            run()

    return steps


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(RECIPES), default="laptop")
    parser.add_argument("--context", type=int, default=16, help="length of the prompt in chunks")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES, help="of the linear layers")
    parser.add_argument("--sequences", type=int, nargs="+", default=NUM_SEQUENCES, help="decoded at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only-steps", action="store_true")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    keep_memory()  # for all variants
    if not args.only_steps:
        measure_linear(args.rounds, args.batch_sizes)
    measure_steps(args.size, args.context, args.rounds, args.sequences)


if __name__ == "__main__":
    main()
