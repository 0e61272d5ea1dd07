"""Find generated texts that depend on a near-tie: texts that change if the weights change by some rounding errors.

Rounding errors depend on the batch size. So the text of a request may differ from the text of the same request alone,
but only where two chunks were almost equally good. All other texts must be the same, whatever else is in the batch.
"""

from collections.abc import Callable

import torch

from calm.generate.sampler import SamplingParams
from calm.generate.text import TextGenerator

RELATIVE_NOISE = 3e-6  # of the weights: 25 times the machine epsilon of fp32
TRIALS = 8  # each resolves a near-tie one way or the other; one in 256 goes unnoticed


def stable_texts(generator: TextGenerator, texts: dict[int, str], generate: Callable[[int], str]) -> dict[int, str]:
    """Those texts, by seed, that `generate(seed)` reproduces with perturbed weights.

    The weights of the generator's model are perturbed in place, and stay so.
    """
    weights = [weight.detach().clone() for weight in generator.model.parameters()]
    noise = torch.Generator().manual_seed(0)
    for _ in range(TRIALS):
        with torch.no_grad():
            for weight, original in zip(generator.model.parameters(), weights, strict=True):
                weight.copy_(original * (1 + RELATIVE_NOISE * torch.randn(original.shape, generator=noise)))
        texts = {seed: text for seed, text in texts.items() if generate(seed) == text}
    return texts


def generate_text(generator: TextGenerator, prompt: str, seed: int, temperature: float, max_new_tokens: int) -> str:
    """The text of a request that is generated alone."""
    ids = generator.tokenizer.encode(prompt)
    deltas = generator.stream([ids], SamplingParams(temperature), max_new_tokens=max_new_tokens, seed=seed)
    return "".join(delta.text for delta in deltas)
