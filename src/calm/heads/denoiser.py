"""What the flow, mean-flow and diffusion heads share: a network from a vector, a time and a condition to a vector.

    y = time embedding + W·hidden   each block: x += gate(y) · MLP(LN(x)·(1 + scale(y)) + shift(y))

Where all samples of a position have one time, as in sampling, y has no sample dimension and is computed once for all.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calm.heads.common import NORM_EPS, initialize_linears, start_at_zero
from calm.models.posterior import Posterior
from calm.noise import Source, draw_normal

FREQUENCIES = 128
LONGEST_PERIOD = 10_000.0
TIMES = 1000  # a time is given as an integer below this


def sinusoids(times: Tensor) -> Tensor:
    """Times (...) of 0 to 1000 → cosines and sines (..., 256)."""
    index = torch.arange(FREQUENCIES, device=times.device, dtype=torch.float32)
    angles = times[..., None].float() * torch.exp(-math.log(LONGEST_PERIOD) / FREQUENCIES * index)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Block(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.norm = nn.LayerNorm(size, eps=NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size))
        self.modulation = nn.Linear(size, 3 * size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(y)).chunk(3, dim=-1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


def time_embedding(size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2 * FREQUENCIES, size), nn.SiLU(), nn.Linear(size, size))


class Denoiser(nn.Module):
    def __init__(self, hidden_size: int, latent_size: int, output_size: int, num_layers: int):
        super().__init__()
        size = hidden_size
        self.time = time_embedding(size)
        self.condition = nn.Linear(hidden_size, size)
        self.input = nn.Linear(latent_size, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(num_layers))
        self.norm = nn.LayerNorm(size, eps=NORM_EPS, elementwise_affine=False)
        self.modulation = nn.Linear(size, 2 * size)
        self.output = nn.Linear(size, output_size)

    def initialize(self) -> None:
        """Blocks begin as the identity and the output at zero."""
        initialize_linears(self)
        for block in self.blocks:
            start_at_zero(block.modulation)  # pyright: ignore[reportArgumentType]
        start_at_zero(self.modulation)
        start_at_zero(self.output)

    def forward(self, x: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        """Vectors (N, ..., Z), integer times that broadcast to (N, ...), `self.condition` of the hidden states."""
        return self.refine(x, self.time(sinusoids(times).to(condition.dtype)) + condition)

    def refine(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = block(x, y)
        shift, scale = self.modulation(F.silu(y)).chunk(2, dim=-1)
        return self.output(self.norm(x) * (1 + scale) + shift)


class DenoisingHead(nn.Module):
    """A head that learns to lead noise to latents."""

    def __init__(self, denoiser: Denoiser, latent_size: int, num_model_samples: int):
        super().__init__()
        self.denoiser, self.latent_size = denoiser, latent_size
        self.num_model_samples = num_model_samples  # N repeats of a position in a step of training

    def initialize(self) -> None:
        self.denoiser.initialize()

    def draw_pairs(self, hidden: Tensor, posterior: Posterior, generator: Source) -> tuple[Tensor, Tensor]:
        """For N repeats of each position a target and noise: (N, ..., Z) twice."""
        count = self.num_model_samples
        target = posterior.float().sample(draw_normal(generator, hidden, count, self.latent_size))
        return target, draw_normal(generator, hidden, count, self.latent_size)
