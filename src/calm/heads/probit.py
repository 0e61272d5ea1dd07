"""The probit head, beyond the paper: the states of a chunk's K tokens as one vector, in one pass from Gaussian noise.

    state_k = mean(hidden, read(state_1), …, read(state_k-1)) + noise_k     token_k = argmax over v of w_v·state_k

The vector has K·d numbers: states like those that the autoencoder's decoder makes of a latent, which decode to the
nearest tokens. Nothing in the head looks at the vocabulary, and the probability of a chunk, an integral over the noise,
is not known: sampling is likelihood-free. The noise makes it a multinomial probit model. Its covariance is such that
all tokens get noise of the same size; scaled by T it acts as a temperature, without candidates.

Training does use likelihoods. `mean` is that of a chain head, which reads true tokens, trained by cross-entropy: noise
of the right size makes the argmax of noisy logits nearly a sample of their softmax (Gumbel noise would make it one).
`read` replaces the token that a state decodes to: on samples of its own, the head learns to predict the same next token
from the states as from the tokens (the KL divergence of the two softmaxes).
"""

import math
from functools import cached_property
from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from calm.autoencoder import Autoencoder, matmul_flops
from calm.heads.base import FORWARD_AND_BACKWARD, HeadCost, Proposals, mixture_bound
from calm.heads.chain import ChainConfig, ChainHead
from calm.noise import RowNoise, Source, draw_normal
from calm.scores.vocabulary import VocabularySubset

GUMBEL_STD = math.pi / math.sqrt(6)
READ_WIDTH = 1024
READ_SCALE = 0.1  # of the states, whose norm is that of sharp logits
NOISE_ROWS = 4096  # token vectors that the noise is fitted to, at most about twice as many
RIDGE = 1e-4  # of the vocabulary's covariance, relative to its mean variance


class ProbitConfig(ChainConfig):
    noise_scale: float = Field(
        1.25, gt=0, description="standard deviation of a logit's noise, in units of Gumbel noise"
    )
    read_stride: int = Field(2, ge=1, description="every how many positions the reading of states is trained")
    read_weight: float = Field(1.0, ge=0, description="weight of that loss")


class Read(nn.Module):
    """A state → the vector of the token that it decodes to, in two steps that refine each other."""

    def __init__(self, size: int):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(size, READ_WIDTH), nn.SiLU(), nn.Linear(READ_WIDTH, size))
        self.second = nn.Sequential(nn.Linear(size, READ_WIDTH), nn.SiLU(), nn.Linear(READ_WIDTH, size))

    def forward(self, states: Tensor) -> Tensor:
        states = READ_SCALE * states
        guess = self.first(states)
        return guess + self.second(states + guess)


class ProbitHead(ChainHead):
    """One vector per chunk, drawn in one pass; likelihood-free when it samples.

    Args:
        config: as of a `ChainHead`, and the fields of `ProbitConfig`.
        autoencoder: its embedding is the vocabulary, unless `untied_lm_head`.

    Example:
        >>> means, states = head.sample(hidden, head.draw_noise(hidden, 8))  # hidden (B, L, H)
        >>> states.shape  # (N, B, L, K, d)
        torch.Size([8, B, L, K, d])
    """

    Config = ProbitConfig
    exact_likelihood = False
    methods = ("token", "batch", "exact", "mixture", "noise")

    def __init__(self, config: Any, autoencoder: Autoencoder):
        super().__init__(config, autoencoder)
        self.noise_scale = config.noise_scale
        self.read_stride, self.read_weight = config.read_stride, config.read_weight
        self.read = Read(self.token_size)
        self.noise_factor: Tensor
        self.register_buffer("noise_factor", torch.eye(self.token_size))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.noise_factor.copy_(torch.eye(self.token_size))

    @torch.no_grad()
    def initialize_from(self, autoencoder: Autoencoder) -> None:
        super().initialize_from(autoencoder)
        self.update_noise(autoencoder.embedding.weight)

    @torch.no_grad()
    def update_noise(self, vocabulary: Tensor) -> None:
        """Fit the noise to token vectors (V, d), or to some of many."""
        some = vocabulary[:: max(1, len(vocabulary) // NOISE_ROWS)]
        self.noise_factor.copy_(whitening_noise(some.to(self.noise_factor), self.noise_scale * GUMBEL_STD))

    def draw_noise(self, hidden: Tensor, num_samples: int, noise: Source = None) -> Tensor:
        """Standard normal noise for hidden states (..., H): (N, ..., K, d)."""
        drawn = draw_normal(noise, hidden, num_samples, self.chunk_size * self.token_size)
        return drawn.unflatten(-1, (self.chunk_size, self.token_size))

    def sample(self, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors for hidden states (..., H) and noise (N, ..., K, d): means and states, each (N, ..., K, d)."""
        shared = self.hidden(hidden)[None]  # (1, ..., K, d): the same for all samples
        noise = (noise @ self.noise_factor).to(shared.dtype)
        read, means, states = shared[..., :0, :], [], []
        for k in range(self.chunk_size):
            means.append(self.states_after(shared[..., k : k + 1, :], read, k)[..., 0, :].expand_as(noise[..., k, :]))
            states.append(means[-1] + noise[..., k, :])
            if k + 1 < self.chunk_size:
                vector = self.read(states[-1].detach())[..., None, :]
                read = torch.cat([read, vector], dim=-2) if k else vector
        return torch.stack(means, dim=-2), torch.stack(states, dim=-2)

    def tokens_of(self, states: Tensor) -> Tensor:
        """The most probable token of each state: (..., d) → (...)."""
        return self.autoencoder.nearest(states.flatten(0, -2), self.vocabulary).view(states.shape[:-1])

    def loss(
        self,
        hidden: Tensor,
        chunks: Tensor,
        *,
        mask: Tensor | None = None,
        noise: Source = None,
        vocabulary: VocabularySubset | None = None,
    ) -> Tensor:
        """Cross-entropy per token, and `read_weight` times the loss of reading states."""
        loss = super().loss(hidden, chunks, mask=mask, noise=noise, vocabulary=vocabulary)
        if self.training and self.lm_head is not None:
            self.update_noise(self.vocabulary)
        if not self.distances or not self.read_weight:
            return loss
        here = slice(None, None, self.read_stride)
        losses = self.read_loss(hidden[:, here].detach(), noise, vocabulary)
        counted = torch.ones(chunks.shape[:-1], device=hidden.device) if mask is None else mask.float()
        read = torch.where(counted[:, here] > 0, losses, 0.0).sum() * self.read_stride / counted.sum().clamp(min=1)
        return loss + self.read_weight * read

    def read_loss(self, hidden: Tensor, noise: Source = None, vocabulary: VocabularySubset | None = None) -> Tensor:
        """How much less the head predicts of the next tokens from states than from their tokens, in nats per token.

        On samples for hidden states (..., H): (...).
        """
        means, states = (part[0] for part in self.sample(hidden, self.draw_noise(hidden, 1, noise)))
        with torch.no_grad():
            known = self.states(hidden, self.tokens_of(states[..., :-1, :]), 1)  # (..., K - 1, d)
        subset = vocabulary or VocabularySubset(torch.arange(self.vocab_size, device=hidden.device), torch.ones(()))
        matrix, importance = self.vocabulary.detach()[subset.ids], subset.weights.log()
        target, found = (
            (self.project(part.flatten(0, -2), matrix).float() + importance).log_softmax(-1)  # (n, S)
            for part in (known, means[..., 1:, :])
        )
        losses = F.kl_div(found, target, reduction="none", log_target=True).sum(-1)
        return losses.view(known.shape[:-1]).mean(-1)

    def propose(self, hidden: Tensor, num_samples: int, noise: Source = None) -> "ProbitProposals":  # pyright: ignore[reportIncompatibleMethodOverride]
        return ProbitProposals(self, *self.sample(hidden, self.draw_noise(hidden, num_samples, noise)))

    def cross_entropy(self, hidden: Tensor, chunks: Tensor, num_latents: int, noise: RowNoise) -> Tensor:
        """An upper bound: the mixture of the softmaxes of `num_latents` draws."""

        def draw(count: int) -> Tensor:
            return self.sample(hidden, self.draw_noise(hidden, count, noise))[0]

        return mixture_bound(draw, self.vocabulary, chunks, num_latents)

    def default_method(self, tempered: bool, truncated: bool) -> str:
        return "mixture" if truncated else "noise" if tempered else "token"

    def cost(self, subset_share: float = 1.0) -> HeadCost:
        chain = super().cost(subset_share)
        once, projection = chain.generation["head"], chain.generation["vocabulary projection"]
        read = (self.chunk_size - 1) * matmul_flops(self.read)
        noise = 2.0 * self.chunk_size * self.noise_factor.numel()
        layers = once - matmul_flops(self.hidden)
        share = 1 / self.read_stride if self.read_weight and self.distances else 0.0
        # On samples: the states twice, once with a gradient; their tokens; two softmaxes, one with a gradient.
        training = {
            "head": chain.training["head"] + share * (4 * once + FORWARD_AND_BACKWARD * read + noise),
            "vocabulary projection": chain.training["vocabulary projection"]
            + share * projection * (1 + 3 * subset_share),
        }
        return chain._replace(
            training=training,
            generation={**chain.generation, "head": once + read + noise},
            candidate={**chain.generation, "head": layers * (1 - 1 / self.chunk_size) + read + noise},
        )

    def activation_size(self) -> float:
        read = self.chunk_size * (4 * READ_WIDTH + (16 * len(self.layers) + 8) * self.token_size)
        return super().activation_size() + read / self.read_stride

    def streamed_weights(self) -> list[Tensor]:
        parts = [p for part in (self.hidden, self.before, self.layers) if part is not None for p in part.parameters()]
        read = [p for p in self.read.parameters() if p.ndim > 1] * self.distances
        return [*(p for p in parts if p.ndim > 1), *read, self.autoencoder.nearest.streamed(self.vocabulary)]


class ProbitProposals(Proposals):
    """Vectors (n, ..., K, d), decoded position by position on a CPU, all at once on a GPU."""

    def __init__(self, head: ProbitHead, means: Tensor, states: Tensor):
        self.head, self.means, self.states = head, means, states
        self.lazy = states.device.type == "cpu"

    def finite(self) -> Tensor:
        return self.states.isfinite().all(-1).all(-1).all(0)

    @cached_property
    def _tokens(self) -> Tensor:
        return self.head.tokens_of(self.states)

    def tokens(self) -> Tensor:
        return self._tokens

    def tokens_at(self, draws: Tensor, rows: Tensor, first: int, last: int) -> Tensor:
        return self.head.tokens_of(self.states[draws, rows, first:last])

    def log_probs(self, prefix: Tensor) -> Tensor:
        means = self.means[..., prefix.shape[-1], :]
        return self.head.project(means, self.head.vocabulary).float().log_softmax(-1)

    def latents(self) -> Tensor:
        return self.head.autoencoder.encode(self._tokens).mean


def whitening_noise(vocabulary: Tensor, std: float) -> Tensor:
    """A factor A (d, d) such that noise ε @ A, ε standard normal, changes the logits of all tokens alike.

    The change w_v·(ε @ A) of a token's logit, relative to the mean of all, has this standard deviation, on average over
    the vocabulary (V, d).
    """
    centered = vocabulary - vocabulary.mean(0)
    size = vocabulary.shape[1]
    covariance = centered.T @ centered / len(centered)
    ridge = RIDGE * covariance.diagonal().mean() + torch.finfo(covariance.dtype).tiny
    factor, _ = torch.linalg.cholesky_ex(covariance + ridge * torch.eye(size, device=covariance.device))
    inverse = torch.linalg.solve_triangular(factor, torch.eye(size, device=covariance.device), upper=False)
    return cast(Tensor, inverse) * std / math.sqrt(size)
