"""Training an autoencoder of 128,257 words: plain cross-entropy over all of them against ours, in one run.

    python benchmarks/autoencoder_vocabulary.py [--words 128257] [--rounds 5]

plain     logits of all tokens and words at once, and torch's cross-entropy on them
sliced    the same loss, a slice of tokens at a time: what `calm train` computes without vocabulary_sample
sampled   the batch's words and some random others, as the recipes do
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from calm.allocator import keep_memory
from calm.bench.clock import ratios, row, take_turns
from calm.bench.models import Training, config_of
from calm.models import autoencoder


def plain_cross_entropy(
    states: Tensor, words: Tensor, targets: Tensor, weights: Tensor, candidates: Tensor | None = None
) -> Tensor:
    return (F.cross_entropy(states @ words.T, targets, reduction="none") * weights).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=128_257)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipe", default="enwik8-autoencoder")
    options = parser.parse_args()
    keep_memory()
    small, all_words = "data.batch_size=4", "autoencoder.vocabulary_sample=null"
    whole = Training(config_of(options.recipe, "laptop", small, all_words), options.words)
    some = Training(config_of(options.recipe, "laptop", small), options.words)
    ours = autoencoder.vocabulary_cross_entropy

    def plain() -> None:
        autoencoder.vocabulary_cross_entropy = plain_cross_entropy
        whole.step()
        autoencoder.vocabulary_cross_entropy = ours

    ways: dict[str, Callable[[], object]] = {"plain": plain, "sliced": whole.step, "sampled": some.step}
    times = take_turns(ways, options.rounds)
    print(f"{options.recipe}, {options.words:,} words, {whole.tokens:,} tokens, medians of {options.rounds}")
    for name, seconds in times.items():
        speed, faster = row("", [1 / spent for spent in seconds], ""), row("", ratios(times["plain"], seconds), "")
        spread = f"({faster.low:.2f} to {faster.high:.2f})"
        print(f"{name:8} {speed.median:6.2f} steps/s, {faster.median:.2f} times plain {spread}")
    print(f"logits of all tokens and words: {whole.tokens * options.words * 4 / 1e9:.2f} GB, and as much for gradients")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
