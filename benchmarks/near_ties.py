"""Which texts a near-tie decides: those that weights moved by some roundings no longer write.

Batches of other sizes round otherwise, so a text that was served among others may differ from the same text alone, but
only where two chunks were as good as equal. All other texts must be the same, whoever else is served.
"""

from collections.abc import Callable

import torch

from calm.sampling.next_chunk import Sampling
from calm.sampling.text import Writer

ROUNDINGS = 3e-6  # 25 times the distance of neighbouring numbers in float32
TIMES = 8  # a near-tie falls to either side, so that one of 256 is overlooked


def settled(writer: Writer, texts: dict[int, str], write: Callable[[int], str]) -> dict[int, str]:
    """Those of the texts, by seed, that `write` still gives with moved weights."""
    weights = [weight.detach().clone() for weight in writer.model.parameters()]
    generator = torch.Generator().manual_seed(0)
    for _ in range(TIMES):
        with torch.no_grad():
            for weight, before in zip(writer.model.parameters(), weights, strict=True):
                weight.copy_(before * (1 + ROUNDINGS * torch.randn(before.shape, generator=generator)))
        texts = {seed: text for seed, text in texts.items() if write(seed) == text}
    return texts


def written(writer: Writer, prompt: str, seed: int, temperature: float, tokens: int) -> str:
    """What a writer gives to a request alone."""
    ids = writer.tokenizer.encode(prompt)
    pieces = writer.write([ids], Sampling(temperature), max_new_tokens=tokens, seed=seed)
    return "".join(piece.text for piece in pieces)
