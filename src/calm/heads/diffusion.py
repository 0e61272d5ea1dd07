"""The diffusion head of §7.4: learn to remove noise, then remove it in small random steps.

Cosine schedule of 1000 steps; the network predicts the noise, and where the variance of a step lies between its bounds.
Sampling goes through fewer steps, spread evenly, with variances recomputed for the distances between them. Where all is
noise, the latent that a prediction stands for is its error times thousands: it is kept to what a latent can be.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from calm.errors import ConfigError
from calm.heads.common import masked_mean
from calm.heads.denoiser import TIMES, Denoiser, DenoisingHead
from calm.models.posterior import Posterior
from calm.noise import Source, draw_normal, draw_uniform

LARGEST_BETA = 0.999


def cosine_betas(steps: int = TIMES) -> Tensor:
    """The variance that each step adds."""

    def remaining(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [1 - remaining((i + 1) / steps) / remaining(i / steps) for i in range(steps)]
    return torch.tensor(betas, dtype=torch.float64, device="cpu").clamp(max=LARGEST_BETA)


@dataclass(frozen=True)
class Schedule:
    """Coefficients of a chain of steps, each a tensor with one entry a step."""

    times: Tensor  # the step of the whole chain that each stands for: what the network is told
    signal: Tensor  # sqrt(abar): x_t = signal·x_0 + noise_scale·noise
    noise_scale: Tensor
    from_start: Tensor  # the mean of x_{t-1} given x_0 and x_t = from_start·x_0 + from_state·x_t
    from_state: Tensor
    log_largest: Tensor  # log of the largest and the smallest sensible variance of x_{t-1}
    log_smallest: Tensor

    @classmethod
    @cache
    def of(cls, num_steps: int) -> "Schedule":
        """`num_steps` of the whole chain, from its first to its last; on the CPU, whatever the default device."""
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

    def at(self, steps: Tensor) -> "Schedule":
        """The coefficients of given steps, with a dimension for the vectors."""
        return Schedule(*(part.to(steps.device)[steps][..., None] for part in vars(self).values()))


class DiffusionHead(DenoisingHead):
    def __init__(
        self,
        hidden_size: int,
        latent_size: int,
        num_layers: int,
        *,
        num_model_samples: int = 8,
        num_sampling_steps: int = 100,
        largest_latent: float | None = None,  # what no number of a latent exceeds; None: nothing is known
    ):
        Schedule.of(num_sampling_steps)  # a wrong number is told now, not when sampling
        denoiser = Denoiser(hidden_size, latent_size, 2 * latent_size, num_layers)
        super().__init__(denoiser, latent_size, num_model_samples)
        self.num_sampling_steps, self.largest_latent = num_sampling_steps, largest_latent

    def sample(
        self,
        hidden: Tensor,
        num_samples: int = 1,
        generator: Source = None,
        noise: Tensor | None = None,
        num_steps: int | None = None,
    ) -> Tensor:
        """Hidden states (..., H) → latents (N, ..., Z). Normal noise (steps, N, ..., Z) may be given: that of the
        beginning, then that of every step but the last.
        """
        steps = num_steps or self.num_sampling_steps
        schedule = Schedule.of(steps)

        def fresh(number: int) -> Tensor:
            return draw_normal(generator, hidden, num_samples, self.latent_size) if noise is None else noise[number]

        x, condition = fresh(0), self.denoiser.condition(hidden)
        for number, step in enumerate(reversed(range(steps)), start=1):
            here = schedule.at(torch.tensor(step, device=x.device))
            output = self.denoiser(x.to(hidden.dtype), here.times[..., 0], condition)
            x, log_variance = self._step(x, here, output, self.largest_latent)
            if step > 0:
                x = x + (0.5 * log_variance).exp() * fresh(number)
        return x.to(hidden.dtype)

    @staticmethod
    def _step(x: Tensor, here: Schedule, output: Tensor, largest: float | None = None) -> tuple[Tensor, Tensor]:
        """The mean and log-variance of x_{t-1} that the network's output stands for."""
        noise, place = output.float().chunk(2, dim=-1)
        start = (x - here.noise_scale * noise) / here.signal
        if largest is not None:
            start = start.clamp(-largest, largest)
        share = (place + 1) / 2
        log_variance = share * here.log_largest + (1 - share) * here.log_smallest
        return here.from_start * start + here.from_state * x, log_variance

    def loss(
        self, hidden: Tensor, posterior: Posterior, mask: Tensor | None = None, generator: Source = None
    ) -> Tensor:
        """The squared error of the noise, and the variational bound (bits a dimension), which trains the variance."""
        target, noise = self.draw_pairs(hidden, posterior, generator)
        steps = (TIMES * draw_uniform(generator, hidden, self.num_model_samples, 1)[..., 0]).long()  # (N, ...)
        here = Schedule.of(TIMES).at(steps)
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
        # At the first step nothing is left to diverge from: the bound is the density of the target itself.
        density = 0.5 * (math.log(2 * math.pi) + log_variance + (target - mean) ** 2 / log_variance.exp())
        bound = torch.where(steps[..., None] == 0, density, divergence) / math.log(2)
        return masked_mean((errors + bound).mean((0, -1)), mask)
