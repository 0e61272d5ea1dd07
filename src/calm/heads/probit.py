"""The probit head, beyond the paper: the states of a chunk's K tokens as one vector, in one pass from Gaussian noise.

    state_k = mean(hidden, read(state_1), …, read(state_k-1)) + noise_k     token_k = argmax over v of w_v·state_k

The vector has K·d numbers: states like those that the autoencoder's decoder makes of a latent, which decode to the
nearest tokens. No token is chosen before the whole vector is drawn, and the probability of a chunk, an integral over
the noise, is not known: sampling is likelihood-free. The noise makes it a multinomial probit model. Its covariance is
such that all tokens get noise of about the same size; scaled by T it acts as a temperature, without candidates.

Training does use likelihoods: the weights are those of a chain head, whose mean reads the true tokens before it. Noise
of the right size makes the argmax of noisy logits nearly a sample of their softmax (Gumbel noise would make it one),
and `read`, attention over the vectors of the most frequent tokens, makes a state nearly the vector of the token that
it decodes to. So the weights of a chain head work as a probit head, and the other way round.
"""

import math
from functools import cached_property
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from calm.autoencoder import Autoencoder, matmul_flops
from calm.heads.base import HeadCost, Proposals, mixture_bound
from calm.heads.chain import ChainConfig, ChainHead
from calm.noise import NoiseSource, RowNoise, draw_normal

GUMBEL_STD = math.pi / math.sqrt(6)
SHARPNESS = 4.0  # of the attention: the logit of the token that a state decodes to exceeds the others by one or two
NOISE_ROWS = 4096  # token vectors that the noise is fitted to, at most about twice as many
RIDGE = 1e-4  # of their covariance, relative to its mean variance


class ProbitConfig(ChainConfig):
    noise_scale: float = Field(
        1.25, gt=0, description="standard deviation of a logit's noise, in units of Gumbel noise"
    )
    num_read_tokens: int = Field(
        1024, ge=1, description="token vectors that states attend to: the first of the vocabulary"
    )


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
    _fitted: tuple[Any, Tensor] = (None, torch.empty(0))  # which vocabulary, and the noise that is fitted to it

    def __init__(self, config: Any, autoencoder: Autoencoder):
        super().__init__(config, autoencoder)
        self.noise_scale, self.num_read_tokens = config.noise_scale, min(config.num_read_tokens, config.vocab_size)

    def train(self, mode: bool = True) -> Any:
        self._fitted = (None, torch.empty(0))  # fused optimizers change weights without changing their version
        return super().train(mode)

    def noise_factor(self) -> Tensor:
        """A (d, d) for noise ε @ A on states; fitted again when the token vectors have changed."""
        vocabulary = self.vocabulary.detach()
        version = (vocabulary.data_ptr(), 0 if vocabulary.is_inference() else vocabulary._version, vocabulary.device)
        if self._fitted[0] != version:
            some = vocabulary[:: max(1, len(vocabulary) // NOISE_ROWS)].float()
            self._fitted = version, whitening_noise(some, self.noise_scale * GUMBEL_STD)
        return self._fitted[1]

    def draw_noise(self, hidden: Tensor, num_samples: int, noise: NoiseSource = None) -> Tensor:
        """Standard normal noise for hidden states (..., H): (N, ..., K, d)."""
        drawn = draw_normal(noise, hidden, num_samples, self.chunk_size * self.token_size)
        return drawn.unflatten(-1, (self.chunk_size, self.token_size))

    def sample(self, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors for hidden states (..., H) and noise (N, ..., K, d): means and states, each (N, ..., K, d)."""
        shared = self.hidden(hidden)[None]  # (1, ..., K, d): the same for all samples
        noise = (noise @ self.noise_factor()).to(shared.dtype)
        read, means, states = shared[..., :0, :], [], []
        for k in range(self.chunk_size):
            means.append(self.states_after(shared[..., k : k + 1, :], read, k)[..., 0, :].expand_as(noise[..., k, :]))
            states.append(means[-1] + noise[..., k, :])
            if k + 1 < self.chunk_size:
                vector = self.read(states[-1])[..., None, :]
                read = torch.cat([read, vector], dim=-2) if k else vector
        return torch.stack(means, dim=-2), torch.stack(states, dim=-2)

    def read(self, states: Tensor) -> Tensor:
        """Attention over token vectors, about that of the token which a state decodes to: (..., d) → (..., d)."""
        tokens = self.vocabulary[: self.num_read_tokens]  # those of a BPE are sorted by frequency
        return (SHARPNESS * self.project(states.flatten(0, -2), tokens)).softmax(-1).matmul(tokens).view_as(states)

    def tokens_of(self, states: Tensor) -> Tensor:
        """The most probable token of each state: (..., d) → (...)."""
        return self.autoencoder.nearest(states.flatten(0, -2), self.vocabulary).view(states.shape[:-1])

    def propose(self, hidden: Tensor, num_samples: int, noise: NoiseSource = None) -> "ProbitProposals":  # pyright: ignore[reportIncompatibleMethodOverride]
        return ProbitProposals(self, *self.sample(hidden, self.draw_noise(hidden, num_samples, noise)))

    def cross_entropy(self, hidden: Tensor, chunks: Tensor, num_latents: int, noise: RowNoise) -> Tensor:
        """An upper bound: the mixture of the softmaxes of `num_latents` draws."""

        def draw(count: int) -> Tensor:
            return self.sample(hidden, self.draw_noise(hidden, count, noise))[0]

        return mixture_bound(draw, self.vocabulary, chunks, num_latents)

    def default_method(self, tempered: bool, truncated: bool) -> str:
        return "mixture" if truncated else "noise" if tempered else "token"

    def cost(self, subset_share: float = 1.0) -> HeadCost:
        chain, size = super().cost(subset_share), self.token_size
        once, layers = chain.generation["head"], chain.generation["head"] - matmul_flops(self.hidden)
        more = 2.0 * self.chunk_size * size**2 + 4.0 * self.distances * self.num_read_tokens * size  # noise, read
        return chain._replace(
            generation={**chain.generation, "head": once + more},
            candidate={**chain.generation, "head": layers * (1 - 1 / self.chunk_size) + more},
        )

    def streamed_weights(self) -> list[Tensor]:
        parts = [p for part in (self.hidden, self.before, self.layers) if part is not None for p in part.parameters()]
        read = [self.vocabulary[: self.num_read_tokens]] * (2 * self.distances)
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
    identity = torch.eye(size, device=covariance.device)
    factor, _ = torch.linalg.cholesky_ex(covariance + ridge * identity)
    return torch.linalg.solve_triangular(factor, identity, upper=False) * std / math.sqrt(size)
