"""The diffusion head of §7.4: learn to predict the noise, then remove it in small random steps.

Cosine schedule of 1000 steps; the network predicts the noise, and the variance of a step between its bounds. Sampling
uses fewer, evenly spaced steps, with variances recomputed for them. Near pure noise the predicted latent is its error
times thousands, so it is clipped to the range of latents.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from calm.autoencoder import Autoencoder, Posterior
from calm.errors import ConfigError
from calm.heads.base import masked_mean
from calm.heads.denoiser import TIMES, Denoiser, DenoisingConfig, DenoisingHead
from calm.noise import NoiseSource, draw_normal, draw_uniform

LARGEST_BETA = 0.999
DEFAULT_STEPS = 100


def cosine_betas(steps: int = TIMES) -> Tensor:
    """The variance that each step adds."""

    def remaining(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [1 - remaining((i + 1) / steps) / remaining(i / steps) for i in range(steps)]
    return torch.tensor(betas, dtype=torch.float64, device="cpu").clamp(max=LARGEST_BETA)


@dataclass(frozen=True)
class Schedule:
    """Coefficients of a chain of steps, one entry per step."""

    times: Tensor  # step of the full chain: the network's time input
    signal: Tensor  # sqrt(abar): x_t = signal·x_0 + noise_scale·noise
    noise_scale: Tensor
    from_start: Tensor  # the mean of x_{t-1} given x_0 and x_t = from_start·x_0 + from_state·x_t
    from_state: Tensor
    log_largest: Tensor  # log of the bounds of the variance of x_{t-1}
    log_smallest: Tensor

    @classmethod
    @cache
    def on(cls, device: torch.device, num_steps: int) -> "Schedule":
        """`Schedule.of`, copied to a device once."""
        return cls(*(part.to(device) for part in vars(cls.of(num_steps)).values()))

    @classmethod
    @cache
    def of(cls, num_steps: int) -> "Schedule":
        """`num_steps` evenly spaced steps of the full chain; on the CPU, whatever the default device."""
        if not 2 <= num_steps <= TIMES:
            raise ConfigError(f"the diffusion head samples in 2 to {TIMES} steps, not {num_steps}")
        times = torch.tensor([round(i * (TIMES - 1) / (num_steps - 1)) for i in range(num_steps)], device="cpu")
        remaining = (1 - cosine_betas()).cumprod(0)[times]  # abar
        before = torch.cat([remaining.new_ones(1), remaining[:-1]])
        betas = 1 - remaining / before
        smallest = betas * (1 - before) / (1 - remaining)
        smallest[0] = smallest[1]  # the first is 0
        parts = (
            remaining.sqrt(),
            (1 - remaining).sqrt(),
            betas * before.sqrt() / (1 - remaining),
            (1 - before) * (1 - betas).sqrt() / (1 - remaining),
            betas.log(),
            smallest.log(),
        )
        return cls(times, *(part.float() for part in parts))

    def at(self, steps: Tensor | int) -> "Schedule":
        """The coefficients of given steps, with a dimension for the vectors."""
        return Schedule(*(part[steps][..., None] for part in vars(self).values()))


class DiffusionConfig(DenoisingConfig):
    num_sampling_steps: int | None = Field(None, ge=2, le=1000, description="denoising steps per sample; null: 100")
    largest_latent: float | None = Field(
        10.0, gt=0, description="bound of a predicted latent's dimensions while sampling; null: no bound"
    )


class DiffusionHead(DenoisingHead):
    """Diffusion (§7.4): learns to predict the noise; samples by removing it in small random steps.

    Example:
        >>> head.sample(hidden, 8, num_steps=20).shape  # hidden (B, L, H)
        torch.Size([8, B, L, Z])
    """

    Config = DiffusionConfig

    def __init__(self, config: Any, autoencoder: Autoencoder | None = None):
        size, latent = config.hidden_size, config.latent_size
        super().__init__(config, Denoiser(size, latent, 2 * latent, config.num_head_layers), autoencoder)
        self.num_sampling_steps: int = config.num_sampling_steps or DEFAULT_STEPS
        Schedule.of(self.num_sampling_steps)  # refuses an unusable number of steps
        self.largest_latent = config.largest_latent

    @property
    def num_evaluations(self) -> int:
        return self.num_sampling_steps

    def sample(
        self,
        hidden: Tensor,
        num_samples: int = 1,
        generator: NoiseSource = None,
        noise: Tensor | None = None,
        num_steps: int | None = None,
    ) -> Tensor:
        """Hidden states (..., H) → latents (N, ..., Z).

        Normal noise (steps, N, ..., Z) may be given: the initial one, then that of every step but the last.
        """
        steps = num_steps or self.num_sampling_steps
        schedule = Schedule.on(hidden.device, steps)

        def fresh(number: int) -> Tensor:
            return draw_normal(generator, hidden, num_samples, self.latent_size) if noise is None else noise[number]

        x, condition = fresh(0), self.denoiser.condition(hidden)
        for number, step in enumerate(reversed(range(steps)), start=1):
            here = schedule.at(step)
            output = self.denoiser(x.to(hidden.dtype), here.times[..., 0], condition)
            x, log_variance = self._step(x, here, output, self.largest_latent)
            if step > 0:
                x = x + (0.5 * log_variance).exp() * fresh(number)
        return x.to(hidden.dtype)

    @staticmethod
    def _step(x: Tensor, here: Schedule, output: Tensor, largest: float | None = None) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of x_{t-1} from the network's output."""
        noise, place = output.float().chunk(2, dim=-1)
        start = (x - here.noise_scale * noise) / here.signal
        if largest is not None:
            start = start.clamp(-largest, largest)
        share = (place + 1) / 2
        log_variance = share * here.log_largest + (1 - share) * here.log_smallest
        return here.from_start * start + here.from_state * x, log_variance

    def latent_loss(
        self, hidden: Tensor, posterior: Posterior, mask: Tensor | None = None, generator: NoiseSource = None
    ) -> Tensor:
        """Squared error of the noise, plus the variational bound (bits per dimension), which trains the variance."""
        target, noise = self.draw_pairs(hidden, posterior, generator)
        steps = (TIMES * draw_uniform(generator, hidden, self.num_model_samples, 1)[..., 0]).long()  # (N, ...)
        here = Schedule.on(steps.device, TIMES).at(steps)
        moved = here.signal * target + here.noise_scale * noise
        output = self.denoiser(moved.to(hidden.dtype), steps, self.denoiser.condition(hidden)).float()
        predicted, place = output.chunk(2, dim=-1)
        errors = (predicted - noise) ** 2
        mean, log_variance = self._step(moved, here, torch.cat([predicted.detach(), place], dim=-1))
        true_mean = here.from_start * target + here.from_state * moved
        divergence = 0.5 * (
            log_variance
            - here.log_smallest
            - 1
            + ((true_mean - mean) ** 2 + here.log_smallest.exp()) / log_variance.exp()
        )
        # At the first step the bound is the negative log-density of the target.
        density = 0.5 * (math.log(2 * math.pi) + log_variance + (target - mean) ** 2 / log_variance.exp())
        bound = torch.where(steps[..., None] == 0, density, divergence) / math.log(2)
        return masked_mean((errors + bound).mean((0, -1)), mask)
