"""Token probabilities from draws: each draw has a softmax per token, and the mean of the draws is a distribution.

    P(x) ≈ mean over i of Π_k p_k(x_k | z_i)

The first token comes from the mean of the draws' softmaxes. Each draw is then weighted by the probability that it gave
to the tokens chosen so far. So temperature, top-k, top-p, and min-p mean what they mean for a softmax model. It needs
whole softmax rows, N·K of them per chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calm.errors import ConfigError
from calm.noise import pick

NextLogProbs = Callable[[Tensor], Tensor]  # the chunk's first tokens (B, k) → log-probabilities of each draw (N, B, V)


@dataclass(frozen=True)
class LogitsProcessor:
    """Temperature and truncation of a distribution over tokens, applied in this order.

    `concat` makes a processor of several rows, whose fields are tensors (B, 1).
    """

    temperature: float | Tensor = 1.0
    top_k: int | Tensor | None = None  # keep the k most probable tokens
    top_p: float | Tensor | None = None  # keep the most probable tokens until they have this probability together
    min_p: float | Tensor | None = None  # keep tokens with at least this share of the largest probability

    def __post_init__(self) -> None:
        if isinstance(self.temperature, Tensor):  # of processors that were checked
            return
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"temperature must be above 0 and finite, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, not {self.top_k}")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, not {value}")

    @staticmethod
    def concat(rows: Sequence["LogitsProcessor"], device: torch.device | str = "cpu") -> "LogitsProcessor":
        """One processor for several rows, each with the fields of its own."""
        if len(set(rows)) == 1:
            return rows[0]

        def column(name: str, neutral: float) -> Tensor | None:
            values = [getattr(row, name) for row in rows]
            if all(value is None for value in values):
                return None
            given = [neutral if value is None else value for value in values]
            return torch.tensor(given, dtype=torch.double, device=device)[:, None]

        temperature, everything = column("temperature", 1.0), float("inf")
        assert temperature is not None
        return LogitsProcessor(
            temperature, column("top_k", everything), column("top_p", everything), column("min_p", 0)
        )

    def __call__(self, log_probs: Tensor) -> Tensor:
        """Log-probabilities or logits (B, V) → normalized probabilities (B, V), in fp64."""
        logits = log_probs.double()
        logits = logits - logits.amax(-1, keepdim=True)  # the largest is 0, so that T = 1e-310 is argmax and not NaN
        p = (logits / self.temperature).softmax(-1)
        if self.top_k is self.top_p is self.min_p is None:
            return p
        if self.top_k is not None or self.top_p is not None:
            ordered, order = p.sort(dim=-1, descending=True, stable=True)
            if self.top_k is not None:
                rank = torch.arange(p.shape[-1], device=p.device)
                ordered = torch.where(rank < self.top_k, ordered, 0)
                ordered = ordered / ordered.sum(-1, keepdim=True)
            if self.top_p is not None:
                before = ordered.cumsum(-1) - ordered  # a token stays while those before it have less than top_p
                ordered = torch.where(before < self.top_p, ordered, 0)
            p = torch.zeros_like(p).scatter(-1, order, ordered)
        if self.min_p is not None:
            p = torch.where(p >= self.min_p * p.amax(-1, keepdim=True), p, 0)
        return p / p.sum(-1, keepdim=True)


class Mixture:
    """The mean of N distributions over chunks, token by token.

    Args:
        log_probs: log-probabilities of the next token under each draw, given the tokens so far.
        batch_size: B.
    """

    def __init__(self, log_probs: NextLogProbs, batch_size: int, device: torch.device | str = "cpu"):
        self.log_probs = log_probs
        self.weights: Tensor | None = None  # (N, B): log-probability that each draw gave to the tokens so far
        self.prefix = torch.empty(batch_size, 0, dtype=torch.long, device=device)  # (B, k)

    def next(self) -> Tensor:
        """Log-probabilities of the next token (B, V)."""
        self.each = self.log_probs(self.prefix).float()  # (N, B, V)
        if self.weights is None:
            self.weights = self.each.new_zeros(self.each.shape[:2])
        if len(self.each) == 1:  # the mean of one
            return self.each[0]
        return torch.logsumexp(self.each + self.weights.log_softmax(0)[..., None], dim=0)

    def append(self, tokens: Tensor) -> None:
        """Continue after tokens (B,)."""
        assert self.weights is not None
        index = tokens[None, :, None].expand(len(self.each), -1, 1)
        self.weights = self.weights + self.each.gather(-1, index)[..., 0]
        self.prefix = torch.cat([self.prefix, tokens[:, None]], dim=1)


def sample_mixture(
    log_probs: NextLogProbs, chunk_size: int, processor: LogitsProcessor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample a chunk for each row by uniform numbers (B, K).

    Returns:
        Ids (B, K), and their log-probabilities before the processor (B, K).
    """
    mixture, chosen = Mixture(log_probs, len(uniform), uniform.device), []
    for k in range(chunk_size):
        next_token = mixture.next()
        token = pick(processor(next_token), uniform[:, k : k + 1])  # (B, 1)
        chosen.append(next_token.gather(1, token)[:, 0])
        mixture.append(token[:, 0])
    return mixture.prefix, torch.stack(chosen, dim=-1)
