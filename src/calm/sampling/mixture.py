"""Likelihoods after all: N latents make an explicit distribution, as the decoder has a softmax for each token.

    P(x) ≈ mean over i of Π_k p_k(x_k | z_i)

The first token comes from the mean of the candidates' softmaxes; each candidate then weighs what it gave to the tokens
chosen so far, and the next comes from the weighted mean. So temperature, top-k, top-p and min-p mean what they mean for
a softmax model. It needs whole softmax rows, N·K of them a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from calm.errors import ConfigError
from calm.noise import pick

Softmaxes = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class Cut:
    """What is done to a distribution over tokens, in this order."""

    temperature: float = 1.0
    top_k: int | None = None  # the most probable tokens, so many
    top_p: float | None = None  # the fewest most probable tokens that have this probability together
    min_p: float | None = None  # tokens that have this share of the largest probability

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"temperature must be above 0 and finite, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, not {self.top_k}")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, not {value}")

    def probabilities(self, log_probabilities: Tensor) -> Tensor:
        """Of log-probabilities (B, V): what is left, tempered and normalised."""
        p = (log_probabilities.double() / self.temperature).softmax(-1)
        if self.top_k is self.top_p is self.min_p is None:
            return p
        if self.top_k is not None and self.top_k < p.shape[-1]:
            top = p.topk(self.top_k)
            p = torch.zeros_like(p).scatter(-1, top.indices, top.values)
            p = p / p.sum(-1, keepdim=True)
        if self.top_p is not None:
            ordered, order = p.sort(-1, descending=True)
            before = ordered.cumsum(-1) - ordered  # a token stays while those before it have less than top_p
            p = torch.zeros_like(p).scatter(-1, order, ordered.where(before < self.top_p, 0))
        if self.min_p is not None:
            p = p.where(p >= self.min_p * p.amax(-1, keepdim=True), 0)
        return p / p.sum(-1, keepdim=True)


class Mixture:
    """The mean of N distributions over chunks, token by token.

    `log_probabilities` takes the tokens so far, each (B,), and gives the next one's under each of them: (B, N, V).
    """

    def __init__(self, log_probabilities: Softmaxes):
        self.log_probabilities = log_probabilities
        self.weights: Tensor | None = None  # (B, N): log of what each candidate gave to the tokens so far
        self.chosen: list[Tensor] = []

    def next(self) -> Tensor:
        """Log-probabilities of the next token (B, V)."""
        self.each = self.log_probabilities(self.chosen).float()  # (B, N, V)
        if self.weights is None:
            self.weights = self.each.new_zeros(self.each.shape[:2])
        if self.each.shape[1] == 1:  # the mean of one
            return self.each[:, 0]
        return torch.logsumexp(self.each + self.weights.log_softmax(1)[..., None], dim=1)

    def take(self, tokens: Tensor) -> None:
        """Go on behind tokens (B,)."""
        assert self.weights is not None
        index = tokens[:, None, None].expand(-1, self.each.shape[1], 1)
        self.weights = self.weights + self.each.gather(-1, index)[..., 0]
        self.chosen.append(tokens)


def sample_mixture(log_probabilities: Softmaxes, chunk_size: int, cut: Cut, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk of each row by uniform numbers (B, K): ids (B, K), and their log-probabilities before the cut (B, K)."""
    mixture, logs = Mixture(log_probabilities), []
    for k in range(chunk_size):
        found = mixture.next()
        token = pick(cut.probabilities(found), uniform[:, k : k + 1])  # (B, 1)
        logs.append(found.gather(1, token)[:, 0])
        mixture.take(token[:, 0])
    return torch.stack(mixture.chosen, dim=-1), torch.stack(logs, dim=-1)


def mixture_nats(nats: Tensor) -> Tensor:
    """From nats of a chunk's tokens under each of N latents (N, ..., K) to those under their mixture (..., K).

    Of the first, the first two, … tokens the sum is -log of the mean over latents: in expectation an upper bound of the
    model's own, as -log is convex, and the closer the larger N is.
    """
    number = torch.tensor(float(len(nats)))
    together = number.log() - torch.logsumexp(-nats.double().cumsum(-1), dim=0)  # (..., K): of the first k
    return together.diff(dim=-1, prepend=torch.zeros_like(together[..., :1]))
