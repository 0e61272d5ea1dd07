"""The mean-flow head, beyond the paper: learn the mean velocity over a span of time; sample in one step over all of it.

    x_t = (1 - t)·z + t·noise     v = noise - z     u(x_t, r, t) = mean of v from r to t     z = noise - u(noise, 0, 1)

Differentiating (t - r)·u by t gives what u is regressed on (Geng et al. 2025, "Mean flows for one-step generative
modeling"): u = v - (t - r)·du/dt, the derivative along the path, dx/dt = v. Where r = t this is flow matching.
"""

from typing import Any

import torch
from torch import Tensor

from calm.autoencoder import Autoencoder, Posterior
from calm.heads.base import masked_mean
from calm.heads.denoiser import Denoiser, DenoisingHead, sinusoids, time_embedding
from calm.noise import NoiseSource, draw_normal, draw_uniform

MEAN_LOGIT = -0.4  # of training times: slightly more of them near the data
FLOW_SHARE = 0.75  # share of training spans of length 0
PERIODS = 10.0  # fastest sine of the time embedding: with 1000, as in the other heads, du/dt is large and diverges
ADAPTIVE_EPS = 0.01  # errors are weighted by (error² + this)^(-1/2), so that a few large ones do not dominate


class SpanDenoiser(Denoiser):
    """A denoiser that is conditioned on the end and the length of a span of time."""

    def __init__(self, hidden_size: int, latent_size: int, num_layers: int):
        super().__init__(hidden_size, latent_size, latent_size, num_layers)
        self.span = time_embedding(hidden_size)

    def forward(self, x: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        """Vectors (N, ..., Z), start and end in [0, 1] that broadcast to (N, ..., 2), the condition (..., H)."""
        start, end = times.unbind(-1)
        time, span = (sinusoids(PERIODS * t).to(condition.dtype) for t in (end, end - start))
        return self.refine(x, self.time(time) + self.span(span) + condition)


class MeanFlowHead(DenoisingHead):
    """Mean flow, beyond the paper: learns the mean velocity over a span of time; samples in one evaluation.

    Example:
        >>> head.sample(hidden, 8).shape  # hidden (B, L, H)
        torch.Size([8, B, L, Z])
    """

    derivative_passes = 2  # torch.func.jvp computes values and their derivatives

    def __init__(self, config: Any, autoencoder: Autoencoder | None = None):
        super().__init__(
            config, SpanDenoiser(config.hidden_size, config.latent_size, config.num_head_layers), autoencoder
        )

    def sample(
        self, hidden: Tensor, num_samples: int = 1, generator: NoiseSource = None, noise: Tensor | None = None
    ) -> Tensor:
        """Hidden states (..., H) → latents (N, ..., Z), in one call. Normal noise (N, ..., Z) may be given."""
        if noise is None:
            noise = draw_normal(generator, hidden, num_samples, self.latent_size)
        whole = torch.arange(2.0, device=noise.device)  # from 0 to 1
        velocity = self.denoiser(noise.to(hidden.dtype), whole, self.denoiser.condition(hidden))
        return (noise - velocity).to(hidden.dtype)

    def latent_loss(
        self, hidden: Tensor, posterior: Posterior, mask: Tensor | None = None, generator: NoiseSource = None
    ) -> Tensor:
        """Adaptively weighted squared error of the mean velocity, a mean over positions."""
        target, noise = self.draw_pairs(hidden, posterior, generator)
        times = self._spans(hidden, generator)  # (N, ..., 2)
        moved = torch.lerp(target, noise, times[..., 1:]).to(hidden.dtype)
        velocity, condition = noise - target, self.denoiser.condition(hidden)
        with torch.no_grad():
            change = self._change(moved, velocity.to(hidden.dtype), times, condition.detach())
            goal = velocity - times.diff(dim=-1) * change.float()
        errors = ((self.denoiser(moved, times, condition).float() - goal) ** 2).mean(-1)
        weighted = errors * (errors.detach() + ADAPTIVE_EPS).rsqrt()
        return masked_mean(weighted.mean(0), mask)

    def _spans(self, hidden: Tensor, generator: NoiseSource) -> Tensor:
        """Start and end of training spans (N, ..., 2): two logit-normal times, three quarters of them equal."""
        times = torch.sigmoid(draw_normal(generator, hidden, self.num_model_samples, 2) + MEAN_LOGIT).sort(-1).values
        no_length = draw_uniform(generator, hidden, self.num_model_samples, 1) < FLOW_SHARE
        return torch.where(no_length, times[..., 1:], times)

    def _change(self, moved: Tensor, velocity: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        """du/dt along the path: dx/dt is the velocity; the start of the span is fixed, and its end moves."""

        def mean_velocity(x: Tensor, times: Tensor) -> Tensor:
            return self.denoiser(x, times, condition)

        only_the_end = torch.arange(2, dtype=times.dtype, device=times.device).expand_as(times)
        return torch.func.jvp(mean_velocity, (moved, times), (velocity, only_the_end.contiguous()))[1]
