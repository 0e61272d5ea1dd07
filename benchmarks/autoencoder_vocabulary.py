"""Training an autoencoder with a vocabulary of 128,257 tokens: three ways to compute the cross-entropy.

    python benchmarks/autoencoder_vocabulary.py [--vocabulary 128257] [--rounds 5]

plain     torch's cross-entropy on the logits of all positions at once
sliced    the same loss, one slice of positions at a time, as in `calm train` without vocabulary_sample
sampled   sampled softmax: the tokens of the batch and random others, as in the recipes
"""

import argparse
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from calm import autoencoder
from calm.bench.clock import ratios, row, take_turns
from calm.bench.models import Training, config_of


def plain_cross_entropy(states: Tensor, vocabulary: Tensor, targets: Tensor, weights: Tensor, *_: object) -> Tensor:
    return (F.cross_entropy(F.linear(states, vocabulary), targets, reduction="none") * weights).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128_257, help="vocabulary size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipe", default="enwik8-autoencoder")
    args = parser.parse_args()
    small_batch, all_tokens = "data.batch_size=4", "autoencoder.vocabulary_sample=null"
    full = Training(config_of(args.recipe, "laptop", small_batch, all_tokens), args.vocabulary)
    sampled = Training(config_of(args.recipe, "laptop", small_batch), args.vocabulary)

    def plain() -> None:
        with mock.patch.object(autoencoder, "vocabulary_cross_entropy", plain_cross_entropy):
            full.step()

    functions: dict[str, Callable[[], object]] = {"plain": plain, "sliced": full.step, "sampled": sampled.step}
    times = take_turns(functions, args.rounds)
    print(f"{args.recipe}, vocabulary {args.vocabulary:,}, {full.tokens:,} tokens, medians of {args.rounds} rounds")
    for name, seconds in times.items():
        speed = row("", [1 / value for value in seconds], "")
        speedup = row("", ratios(times["plain"], seconds), "")
        spread = f"({speedup.low:.2f} to {speedup.high:.2f})"
        print(f"{name:8} {speed.median:6.2f} steps/s, speedup over plain {speedup.median:.2f}x {spread}")
    logits = full.tokens * args.vocabulary * 4 / 1e9
    print(f"memory of the full logits: {logits:.2f} GB, and as much for their gradient")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
