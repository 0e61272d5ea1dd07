"""The chain head, beyond the paper: the next chunk's tokens, one after the other, by the chain rule.

    P(chunk | hidden) = Π_k P(x_k | hidden, x_<k)     P(x_k = v | …) = softmax over v of w_v·state_k
    state_k = layers( W_k·hidden + the tokens before k, each through a map for its distance )

It predicts tokens, not vectors, so it is not likelihood-free: it has token probabilities, and a temperature costs
nothing. The backbone, which is most of a model, still makes one step for K tokens. The token vectors w_v are the
autoencoder's embedding, frozen, or an untied `lm_head` that starts as a copy of it and is trained.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from calm.autoencoder import Autoencoder, SplitLinear, SwiGLULayer, VocabularyProjection, matmul_flops
from calm.heads.base import (
    FORWARD_AND_BACKWARD,
    NORM_EPS,
    Head,
    HeadConfig,
    HeadCost,
    TokenProposals,
    count_parameters,
)
from calm.noise import NoiseSource, RowNoise, draw_uniform
from calm.scores.vocabulary import VocabularySubset, sample_tokens, token_losses, vocabulary_cross_entropy

INITIAL_STD = 0.02


class ChainConfig(HeadConfig):
    untied_lm_head: bool = Field(
        False, description="train token vectors of the head's own, which start as the autoencoder's embedding"
    )


class ChainHead(Head):
    """Autoregressive tokens within a chunk; has exact likelihoods.

    Args:
        config: needs `hidden_size`, `chunk_size`, `vocab_size`, `num_head_layers`, and the fields of `ChainConfig`.
        autoencoder: its embedding is the vocabulary, unless `untied_lm_head`.

    Example:
        >>> head.propose(hidden, 8).tokens().shape  # hidden (B, L, H)
        torch.Size([8, B, L, K])
    """

    Config = ChainConfig
    exact_likelihood = True
    vocabulary_loss = True
    methods = ("token", "batch", "exact", "mixture")
    unsupported_reason = "the chain head has no noise to scale"

    def __init__(self, config: Any, autoencoder: Autoencoder):
        super().__init__(config, autoencoder)
        size = autoencoder.config.hidden_size
        self.token_size, self.distances = size, config.chunk_size - 1
        self.lm_head = nn.Embedding(config.vocab_size, size) if config.untied_lm_head else None
        self.hidden = SplitLinear(config.hidden_size, config.chunk_size, size)
        self.before = nn.Linear(self.distances * size, size, bias=False) if self.distances else None
        self.layers = nn.Sequential(
            *(SwiGLULayer(size, 8 * size // 3, NORM_EPS) for _ in range(config.num_head_layers))
        )
        self.norm = nn.RMSNorm(size, eps=NORM_EPS)
        self.project = VocabularyProjection()

    def reset_parameters(self) -> None:
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=INITIAL_STD)
                if isinstance(part, nn.Linear) and part.bias is not None:
                    nn.init.zeros_(part.bias)
            elif isinstance(part, nn.RMSNorm):
                nn.init.ones_(part.weight)

    @torch.no_grad()
    def initialize_from(self, autoencoder: Autoencoder) -> None:
        if self.lm_head is not None:
            self.lm_head.weight.copy_(autoencoder.embedding.weight)

    @property
    def vocabulary(self) -> Tensor:
        """Token vectors (V, d)."""
        return (self.lm_head or self.autoencoder.embedding).weight

    def states(self, hidden: Tensor, prefix: Tensor, first: int = 0) -> Tensor:
        """States of the tokens from `first` to the one after a prefix.

        Args:
            hidden: (..., H).
            prefix: the chunk's first n < K tokens (..., n); it may have more dimensions in front: several prefixes
                for one hidden state.

        Returns:
            (..., n + 1 - first, d)
        """
        return self.states_after(self.hidden(hidden, first, prefix.shape[-1] + 1), self.vocabulary[prefix], first)

    def states_after(self, states: Tensor, vectors: Tensor, first: int = 0) -> Tensor:
        """The same, given what `self.hidden` adds to them (..., n + 1 - first, d), and vectors (..., n, d)."""
        if self.before is not None:
            window = F.pad(vectors, (0, 0, self.distances, 0)).unfold(-2, self.distances, 1)  # (..., n + 1, d, K - 1)
            states = states + self.before(window[..., first:, :, :].flatten(-2))
        return self.norm(self.layers(states))

    def next_state(self, hidden: Tensor, prefix: Tensor) -> Tensor:
        """State of the token after a prefix (..., k): (..., d)."""
        return self.states(hidden, prefix, prefix.shape[-1])[..., 0, :]

    def loss(
        self,
        hidden: Tensor,
        chunks: Tensor,
        *,
        mask: Tensor | None = None,
        noise: NoiseSource = None,
        vocabulary: VocabularySubset | None = None,
    ) -> Tensor:
        """Cross-entropy per token."""
        states = self.states(hidden, chunks[..., :-1]).flatten(0, -2)
        counted = torch.ones(chunks.shape[:-1], device=hidden.device) if mask is None else mask.float()
        weights = (counted / (self.chunk_size * counted.sum().clamp(min=1))).flatten()
        weights = weights.repeat_interleave(self.chunk_size)
        targets = chunks.flatten()
        return vocabulary_cross_entropy(states, self.vocabulary, targets, weights, vocabulary, self.project.forward)

    def propose(self, hidden: Tensor, num_samples: int, noise: NoiseSource = None) -> "ChainProposals":
        return ChainProposals(self, hidden, num_samples, noise)

    def cross_entropy(self, hidden: Tensor, chunks: Tensor, num_latents: int, noise: RowNoise) -> Tensor:
        """Exact; needs neither latents nor noise."""
        states = self.states(hidden, chunks[..., :-1]).flatten(0, -2)
        return token_losses(states, self.vocabulary, chunks.flatten())[1].view(chunks.shape)

    def default_method(self, tempered: bool, truncated: bool) -> str:
        return "mixture" if tempered or truncated else "token"

    def cost(self, subset_share: float = 1.0) -> HeadCost:
        once = matmul_flops(self.hidden)
        tokens = self.chunk_size * matmul_flops(*(part for part in (self.before, self.layers) if part is not None))
        projection = 2.0 * self.chunk_size * self.vocabulary.numel()
        lm_head = count_parameters(self.lm_head) if self.lm_head is not None else 0
        passes = FORWARD_AND_BACKWARD if lm_head else 2  # a frozen vocabulary has no gradient
        return HeadCost(
            parameters={"head": count_parameters(self) - lm_head, "vocabulary projection": lm_head},
            training={
                "head": FORWARD_AND_BACKWARD * (once + tokens),
                "vocabulary projection": passes * projection * subset_share,
            },
            generation={"head": once + tokens, "vocabulary projection": projection},
            candidate={},
        )

    def compile_units(self) -> list[nn.Module]:
        return list(self.layers)

    def activation_size(self) -> float:
        return self.chunk_size * (16 * len(self.layers) + self.chunk_size + 6) * self.token_size

    def quantizable(self) -> list[nn.Module]:
        return [self.layers]  # the others are called with slices of their weights

    def streamed_weights(self) -> list[Tensor]:
        parts = [p for part in (self.hidden, self.before, self.layers) if part is not None for p in part.parameters()]
        return [*(p for p in parts if p.ndim > 1), *[self.vocabulary] * self.chunk_size]


class ChainProposals(TokenProposals):
    """Tokens drawn from the softmaxes."""

    head: ChainHead

    def draw(self) -> Tensor:
        head, hidden = self.head, self.hidden
        uniform = draw_uniform(self.noise, hidden, self.num_samples, head.chunk_size)  # (N, ..., K)
        state = head.next_state(hidden, torch.empty(*hidden.shape[:-1], 0, dtype=torch.long, device=hidden.device))
        for_all = uniform[..., 0].flatten(1).T.contiguous()  # one state for N samples
        first = sample_tokens(state.flatten(0, -2), head.vocabulary, for_all, head.project)
        chunks = first.T.reshape(uniform.shape[:-1])[..., None]  # (N, ..., 1)
        for k in range(1, head.chunk_size):
            states = head.next_state(hidden, chunks).flatten(0, -2)
            drawn = sample_tokens(states, head.vocabulary, uniform[..., k].reshape(-1, 1), head.project)
            chunks = torch.cat([chunks, drawn.view(*chunks.shape[:-1], 1)], dim=-1)
        return chunks

    def log_probs(self, prefix: Tensor) -> Tensor:
        """The same for every draw: (1, ..., V)."""
        state = self.head.next_state(self.hidden, prefix)
        logits = self.head.project(state.flatten(0, -2), self.head.vocabulary).unflatten(0, state.shape[:-1])
        return logits.float().log_softmax(-1)[None]

    def latents(self) -> Tensor:
        return self.head.autoencoder.encode(self._tokens).mean
