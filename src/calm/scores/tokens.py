"""The nats of tokens under softmaxes over a vocabulary: the loss of the chain head.

Sums over the vocabulary may be estimated from some of its words (`Words`): all of a batch, and random others, which
stand for the rest.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from calm.products import linear


class Words(NamedTuple):
    ids: Tensor  # (W,), sorted; every target is among them
    weights: Tensor  # (W,): how many words of the vocabulary each stands for

    def to(self, device: torch.device) -> "Words":
        return Words(self.ids.to(device), self.weights.to(device))


def token_nats(states: Tensor, vocabulary: Tensor, targets: Tensor, words: Words | None = None) -> Tensor:
    """States (..., K, d), words (V, d) and targets (..., K) → nats (..., K)."""
    if words is not None:
        vocabulary, targets = vocabulary[words.ids], torch.searchsorted(words.ids, targets.contiguous())
    logits = linear(states, vocabulary).float()  # (..., K, W)
    chosen = logits.gather(-1, targets[..., None])[..., 0]
    return (logits if words is None else logits + words.weights.log()).logsumexp(-1) - chosen
