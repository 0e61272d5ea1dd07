"""BrierLM of all positions at once against a loop over positions with one continuation each.

    python benchmarks/brier_lm.py [--threads 1]

8 texts of 512 tokens, 4 layers, 256 wide, a vocabulary of 8,192. Weights are random, scaled so that two draws agree
about as often as those of a trained model: what agrees has to be continued. The loop keeps the cache of what it has
read, so a position costs it one short forward pass a token.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from calm.evaluate.estimators import CalmEstimator, SoftmaxEstimator
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import CalmConfig
from calm.noise import RowNoise
from calm.scores.brier import LONGEST, accuracy_and_collision

ROWS, LENGTH, VOCABULARY = 8, 512, 8192
BACKBONE = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
Step = Callable[[Tensor, DynamicCache], Tensor]  # reads ids (rows, 1) and draws the next tokens (rows,)
AUTOENCODER = {"chunk_size": 1, "latent_size": 32, "hidden_size": 256, "intermediate_size": 512}


def loop(step: Step, tokens: Tensor) -> Tensor:
    """Two continuations at every position, one position after the other: (rows, positions, 4) Brier scores."""
    found, cache = [], DynamicCache()
    doubled = tokens.repeat(2, 1)
    for position in range(LENGTH):
        drawn = [step(doubled[:, position : position + 1], cache)]
        while len(drawn) < LONGEST:
            drawn.append(step(drawn[-1][:, None], cache))
        cache.crop(-(LONGEST - 1))
        samples = torch.stack(drawn, dim=-1).unflatten(0, (2, ROWS))
        accuracy, collision = accuracy_and_collision(samples, tokens[:, position + 1 : position + 1 + LONGEST])
        found.append(2 * accuracy - collision)
    return torch.stack(found, dim=1)


def softmax_step(model: Any) -> Step:
    def step(ids: Tensor, cache: DynamicCache) -> Tensor:
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
        return logits.softmax(-1).multinomial(1)[:, 0]

    return step


def calm_step(model: Any) -> Step:
    def step(ids: Tensor, cache: DynamicCache) -> Tensor:
        embedded = model.embed(ids[..., None])
        hidden = model.backbone(inputs_embeds=embedded, past_key_values=cache, use_cache=True).last_hidden_state
        return model.draw(hidden[:, -1])[0, :, 0]

    return step


def seconds(function: Callable, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + LONGEST))
    softmax: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **BACKBONE)).eval()  # pyright: ignore
    softmax.lm_head.weight.mul_(12)
    autoencoder = {**AUTOENCODER, "vocab_size": VOCABULARY, "initializer_range": 0.2}
    calm: Any = CalmForCausalLM(CalmConfig(BACKBONE, autoencoder)).eval()
    torch.nn.init.normal_(calm.head.latent.weight)
    torch.nn.init.normal_(calm.head.latent.bias, std=60.0)
    cases = {
        "softmax": (softmax_step(softmax), SoftmaxEstimator(softmax, LENGTH, options.samples)),
        "calm, K = 1": (calm_step(calm), CalmEstimator(calm, LENGTH, options.samples)),
    }
    for name, (step, estimator) in cases.items():
        estimate = partial(estimator.estimate, tokens)
        _, collision, _ = estimate(RowNoise(list(range(ROWS))))
        ours = seconds(lambda estimate=estimate: estimate(RowNoise(list(range(ROWS)))), options.repeats)
        theirs = seconds(partial(loop, step, tokens), 1)
        print(f"{name}: {ours:.2f} s at once, {theirs:.1f} s in a loop, {theirs / ours:.1f} times")
        print("  pairs that agree: " + ", ".join(f"{100 * c:.2f}%" for c in collision.mean((0, 1))), flush=True)


if __name__ == "__main__":
    main()
