"""The flow-matching head of §7.4: learn the velocity that carries noise to the latent, then follow it.

x_t = (1 - t)·noise + t·z     velocity = z - noise     t from 0 to 1 in a few Euler or midpoint steps
"""

from typing import Literal

import torch
from torch import Tensor

from calm.errors import ConfigError
from calm.heads.common import masked_mean
from calm.heads.denoiser import TIMES, Denoiser, DenoisingHead
from calm.models.posterior import Posterior
from calm.noise import Source, draw_normal, draw_uniform

Sampler = Literal["euler", "midpoint"]


class FlowHead(DenoisingHead):
    def __init__(
        self,
        hidden_size: int,
        latent_size: int,
        num_layers: int,
        *,
        num_model_samples: int = 8,
        sampler: Sampler = "midpoint",
        num_sampling_steps: int = 10,
    ):
        super().__init__(Denoiser(hidden_size, latent_size, latent_size, num_layers), latent_size, num_model_samples)
        self.sampler: Sampler = sampler
        self.num_sampling_steps = num_sampling_steps

    def sample(
        self,
        hidden: Tensor,
        num_samples: int = 1,
        generator: Source = None,
        noise: Tensor | None = None,
        num_steps: int | None = None,
        sampler: Sampler | None = None,
    ) -> Tensor:
        """Hidden states (..., H) → latents (N, ..., Z). Normal noise (N, ..., Z) to begin with may be given."""
        steps = num_steps or self.num_sampling_steps
        sampler = sampler or self.sampler
        if sampler not in ("euler", "midpoint"):
            raise ConfigError(f"the flow head's sampler is euler or midpoint, not {sampler!r}")
        x = draw_normal(generator, hidden, num_samples, self.latent_size) if noise is None else noise
        condition = self.denoiser.condition(hidden)

        def velocity(at: Tensor, numerator: int) -> Tensor:
            """The velocity at time numerator / (2·steps); whole numbers, so that no rounding moves a time."""
            time = torch.tensor(TIMES * numerator // (2 * steps), device=at.device)
            return self.denoiser(at.to(hidden.dtype), time, condition).to(at.dtype)

        for step in range(steps):
            change = velocity(x, 2 * step)
            if sampler == "midpoint":
                change = velocity(x + change / (2 * steps), 2 * step + 1)
            x = x + change / steps
        return x.to(hidden.dtype)

    def loss(
        self, hidden: Tensor, posterior: Posterior, mask: Tensor | None = None, generator: Source = None
    ) -> Tensor:
        """The squared error of the velocity, a mean over positions and dimensions."""
        target, noise = self.draw_pairs(hidden, posterior, generator)
        t = draw_uniform(generator, hidden, self.num_model_samples, 1)  # (N, ..., 1)
        times = (TIMES * t[..., 0]).long()
        moved = (1 - t) * noise + t * target
        predicted = self.denoiser(moved.to(hidden.dtype), times, self.denoiser.condition(hidden))
        errors = (predicted.float() - (target - noise)) ** 2
        return masked_mean(errors.mean((0, -1)), mask)
