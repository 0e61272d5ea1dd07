"""BrierLM at all positions at once, compared with a loop over positions.

    python benchmarks/brier_lm.py [--threads 1]

8 sequences of 512 tokens, 4 layers of width 256, a vocabulary of 8,192. The weights are random, but scaled such that
two samples agree about as often as those of a trained model, since only samples that agree are continued. The loop
keeps its KV cache, so that each position costs one short forward pass per token.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calm.evaluate.estimators import estimator_of
from calm.llama import LlamaConfig
from calm.model import Calm, PlainCalmConfig
from calm.noise import RowNoise
from calm.scores.brier import MAX_NGRAM, accuracy_and_collision
from calm.transformer import Transformer

ROWS, LENGTH, VOCAB_SIZE = 8, 512, 8192
BACKBONE = LlamaConfig(
    vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4
)
AUTOENCODER = {
    "vocab_size": VOCAB_SIZE,
    "chunk_size": 1,
    "latent_size": 32,
    "hidden_size": 256,
    "intermediate_size": 512,
    "initializer_range": 0.2,
}


def loop(model: Any, tokens: Tensor, length: int) -> Tensor:
    """Brier scores from two continuations of each position, one position after the other: (B, length, 4)."""
    scores, cache = [], model.backbone.new_cache()

    def sample(ids: Tensor) -> Tensor:
        """Read ids (2B, 1); returns samples of the next tokens (2B,)."""
        hidden = model.backbone(model.embed(ids[..., None]), cache=cache)[:, -1]
        return model.head.propose(hidden, 1).tokens()[0, :, 0]

    doubled = tokens.repeat(2, 1)
    for position in range(length):
        continuation = [sample(doubled[:, position : position + 1])]
        while len(continuation) < MAX_NGRAM:
            continuation.append(sample(continuation[-1][:, None]))
        cache.crop(position + 1)
        samples = torch.stack(continuation, dim=-1).unflatten(0, (2, len(tokens)))
        accuracy, collision = accuracy_and_collision(samples, tokens[:, position + 1 : position + 1 + MAX_NGRAM])
        scores.append(2 * accuracy - collision)
    return torch.stack(scores, dim=1)


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def make_models() -> dict[str, Any]:
    transformer = Transformer(BACKBONE).eval()
    transformer.lm_head.weight.mul_(12)
    calm: Any = Calm(PlainCalmConfig(BACKBONE, AUTOENCODER)).eval()
    torch.nn.init.normal_(calm.head.latent.weight)
    torch.nn.init.normal_(calm.head.latent.bias, std=60.0)
    return {"Transformer": transformer, "CALM, K = 1": calm}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=2, help="samples per position")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens per sequence")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (ROWS, args.length + MAX_NGRAM))
    for name, model in make_models().items():
        estimator = estimator_of(model, args.length, args.samples)  # also optimizes the model, for the loop as well
        _, collision, _ = estimator.estimate(tokens, RowNoise(list(range(ROWS))))

        def estimate(estimator: Any = estimator) -> None:
            estimator.estimate(tokens, RowNoise(list(range(ROWS))))

        at_once = median_seconds(estimate, args.repeats)
        in_loop = median_seconds(partial(loop, model, tokens, args.length), 1)
        speedup = in_loop / at_once
        print(f"{name}: {at_once:.2f} s at once, {in_loop:.1f} s in a loop, speedup {speedup:.1f}x")
        shares = ", ".join(f"{100 * share:.2f}%" for share in collision.mean((0, 1)))
        print(f"  pairs of samples that agree in 1 to {MAX_NGRAM} tokens: {shares}", flush=True)


if __name__ == "__main__":
    main()
