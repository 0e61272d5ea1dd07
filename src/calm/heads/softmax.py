"""The softmax over tokens of a standard Transformer, behind the same contract: a chunk has one token."""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calm.autoencoder import matmul_flops
from calm.heads.base import FORWARD_AND_BACKWARD, Head, HeadCost, TokenProposals, count_parameters
from calm.noise import NoiseSource, RowNoise, draw_uniform, pick
from calm.scores.vocabulary import Projection, VocabularySubset, token_losses, vocabulary_cross_entropy


class _Sizes(NamedTuple):
    chunk_size: int
    vocab_size: int


class SoftmaxHead(Head):
    """Softmax over the vocabulary.

    Args:
        lm_head: the output projection (H → V). The model owns it; the head only refers to it.
        project: how hidden states become logits; by default by `lm_head`.
        matmul: how the loss multiplies states with the projection's weight.
    """

    exact_likelihood = True
    vocabulary_loss = True
    methods = ("mixture",)
    unsupported_reason = "it has token probabilities, and a temperature needs no candidates"
    lm_head: nn.Linear
    project: nn.Module
    matmul: Projection

    def __init__(self, lm_head: Any, project: nn.Module | None = None, matmul: Projection = F.linear):
        super().__init__(_Sizes(1, lm_head.weight.shape[0]), None)
        object.__setattr__(self, "lm_head", lm_head)
        object.__setattr__(self, "project", project or lm_head)
        object.__setattr__(self, "matmul", matmul)

    def reset_parameters(self) -> None:
        """The model initializes the projection."""

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
        counted = torch.ones(chunks.shape[:-1], device=hidden.device) if mask is None else mask.float()
        weights = (counted / counted.sum().clamp(min=1)).flatten()
        states, targets = hidden.flatten(0, -2), chunks.flatten()
        return vocabulary_cross_entropy(states, self.lm_head.weight, targets, weights, vocabulary, self.matmul)

    def propose(self, hidden: Tensor, num_samples: int, noise: NoiseSource = None) -> "SoftmaxProposals":
        return SoftmaxProposals(self, hidden, num_samples, noise)

    def cross_entropy(self, hidden: Tensor, chunks: Tensor, num_latents: int, noise: RowNoise) -> Tensor:
        states = hidden.flatten(0, -2)
        return token_losses(states, self.lm_head.weight, chunks.flatten())[1].view(chunks.shape)

    def default_method(self, tempered: bool, truncated: bool) -> str:
        return "mixture"

    def cost(self, subset_share: float = 1.0) -> HeadCost:
        flops = matmul_flops(self.lm_head)
        return HeadCost(
            parameters={"vocabulary projection": count_parameters(self.lm_head)},
            training={"vocabulary projection": FORWARD_AND_BACKWARD * flops * subset_share},
            generation={"vocabulary projection": flops},
            candidate={},
        )

    def activation_size(self) -> float:
        if self.project is self.lm_head:  # the loss holds a slice of the logits at a time
            return 2.0 * self.lm_head.in_features
        return 3.0 * self.lm_head.out_features

    def quantizable(self) -> list[nn.Module]:
        return []

    def streamed_weights(self) -> list[Tensor]:
        return [self.lm_head.weight]


class SoftmaxProposals(TokenProposals):
    head: SoftmaxHead

    @cached_property
    def _log_probs(self) -> Tensor:
        return self.head.project(self.hidden).float().log_softmax(-1)  # (..., V)

    def draw(self) -> Tensor:
        uniform = draw_uniform(self.noise, self.hidden, self.num_samples, 1)[..., 0]  # (N, ...)
        drawn = pick(self._log_probs.exp().flatten(0, -2), uniform.flatten(1).T.contiguous())
        return drawn.T.reshape(uniform.shape)[..., None]

    def log_probs(self, prefix: Tensor) -> Tensor:
        return self._log_probs[None]

    def latents(self) -> Tensor:
        raise NotImplementedError("a Transformer has no latent vectors")
