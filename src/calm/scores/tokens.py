"""Scores of the tokens that latents stand for, through the decoder's softmax. Beyond the paper: the objective of the
variational head.

    nats     -log p_k(y_k | z) of each token
    Brier    of the first 1, …, K tokens under the mixture of all latents, unbiased from N of them:
             2·mean_i Π_k p_k(y_k | z_i) - mean_{i≠j} Π_k Σ_x p_k(x | z_i)·p_k(x | z_j)

Sums over the vocabulary may be estimated from some of its words (`Words`): all of a batch, and random others, which
stand for the rest.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Words(NamedTuple):
    ids: Tensor  # (W,), sorted; every target is among them
    weights: Tensor  # (W,): how many words of the vocabulary each stands for

    def to(self, device: torch.device) -> "Words":
        return Words(self.ids.to(device), self.weights.to(device))


def token_nats(states: Tensor, vocabulary: Tensor, targets: Tensor, words: Words | None = None) -> Tensor:
    """States (..., K, d), words (V, d) and targets (..., K) → nats (..., K)."""
    return -_chosen(_log_probabilities(states, vocabulary, words), targets, words)


def prefix_brier(states: Tensor, vocabulary: Tensor, targets: Tensor, words: Words | None = None) -> Tensor:
    """States (N, ..., K, d) of N ≥ 2 latents → Brier of the first 1, …, K tokens (..., K)."""
    count = len(states)
    logs = _log_probabilities(states, vocabulary, words)  # (N, ..., K, W)
    accuracy = _chosen(logs, targets, words).cumsum(-1).exp().mean(0)
    rows = logs.exp().movedim(0, -2)  # (..., K, N, W)
    with torch.autocast(states.device.type, enabled=False):  # in bf16 the differences below would be lost
        pairs = rows @ (rows if words is None else rows * words.weights).mT  # (..., K, N, N)
    pairs = pairs.cumprod(-3)
    own = pairs.diagonal(dim1=-2, dim2=-1).sum(-1)
    return 2 * accuracy - (pairs.sum((-1, -2)) - own) / (count * (count - 1))


def _log_probabilities(states: Tensor, vocabulary: Tensor, words: Words | None) -> Tensor:
    if words is None:
        return (states @ vocabulary.T).float().log_softmax(-1)
    logits = (states @ vocabulary[words.ids].T).float()
    return logits - (logits + words.weights.log()).logsumexp(-1, keepdim=True)


def _chosen(logs: Tensor, targets: Tensor, words: Words | None) -> Tensor:
    """Entries of the targets (..., K) in (..., K, W), or in (N, ..., K, W)."""
    index = targets if words is None else torch.searchsorted(words.ids, targets.contiguous())
    return logs.gather(-1, index.expand(logs.shape[:-1])[..., None])[..., 0]
