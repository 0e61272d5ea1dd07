"""The flow-matching head of §7.4: learn the velocity from noise to the latent, then integrate it.

x_t = (1 - t)·noise + t·z     velocity = z - noise     t from 0 to 1 in a few Euler or midpoint steps
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from calm.autoencoder import Autoencoder, Posterior
from calm.errors import ConfigError
from calm.heads.base import masked_mean
from calm.heads.denoiser import TIMES, Denoiser, DenoisingConfig, DenoisingHead
from calm.noise import NoiseSource, draw_normal, draw_uniform

Sampler = Literal["euler", "midpoint"]
DEFAULT_STEPS = {"euler": 20, "midpoint": 10}


class FlowConfig(DenoisingConfig):
    sampler: Sampler = Field("midpoint", description="ODE solver of the flow head")
    num_sampling_steps: int | None = Field(
        None, ge=1, description="solver steps per sample; null: 10 midpoint or 20 Euler steps"
    )


class FlowHead(DenoisingHead):
    """Flow matching (§7.4): learns the velocity from noise to latents; samples with an ODE solver.

    Example:
        >>> head.sample(hidden, 8, num_steps=4).shape  # hidden (B, L, H)
        torch.Size([8, B, L, Z])
    """

    Config = FlowConfig

    def __init__(self, config: Any, autoencoder: Autoencoder | None = None):
        size, latent = config.hidden_size, config.latent_size
        super().__init__(config, Denoiser(size, latent, latent, config.num_head_layers), autoencoder)
        self.sampler: Sampler = config.sampler
        self.num_sampling_steps: int = config.num_sampling_steps or DEFAULT_STEPS[config.sampler]

    @property
    def num_evaluations(self) -> int:
        return self.num_sampling_steps * (2 if self.sampler == "midpoint" else 1)

    def sample(
        self,
        hidden: Tensor,
        num_samples: int = 1,
        generator: NoiseSource = None,
        noise: Tensor | None = None,
        num_steps: int | None = None,
        sampler: Sampler | None = None,
    ) -> Tensor:
        """Hidden states (..., H) → latents (N, ..., Z). The initial normal noise (N, ..., Z) may be given."""
        steps = num_steps or self.num_sampling_steps
        sampler = sampler or self.sampler
        if sampler not in ("euler", "midpoint"):
            raise ConfigError(f"sampler must be euler or midpoint, not {sampler!r}")
        x = draw_normal(generator, hidden, num_samples, self.latent_size) if noise is None else noise
        condition = self.denoiser.condition(hidden)

        def velocity(at: Tensor, numerator: int) -> Tensor:
            """Velocity at time numerator / (2·steps), in integers so that rounding does not shift it."""
            time = torch.full((), TIMES * numerator // (2 * steps), device=at.device)
            return self.denoiser(at.to(hidden.dtype), time, condition).to(at.dtype)

        for step in range(steps):
            change = velocity(x, 2 * step)
            if sampler == "midpoint":
                change = velocity(x + change / (2 * steps), 2 * step + 1)
            x = x + change / steps
        return x.to(hidden.dtype)

    def latent_loss(
        self, hidden: Tensor, posterior: Posterior, mask: Tensor | None = None, generator: NoiseSource = None
    ) -> Tensor:
        """Squared error of the velocity, a mean over positions and dimensions."""
        target, noise = self.draw_pairs(hidden, posterior, generator)
        t = draw_uniform(generator, hidden, self.num_model_samples, 1)  # (N, ..., 1)
        times = (TIMES * t[..., 0]).long()
        moved = (1 - t) * noise + t * target
        predicted = self.denoiser(moved.to(hidden.dtype), times, self.denoiser.condition(hidden))
        errors = (predicted.float() - (target - noise)) ** 2
        return masked_mean(errors.mean((0, -1)), mask)
