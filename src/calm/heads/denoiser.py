"""The network of the flow, mean-flow, and diffusion heads: from a vector, a time, and a condition to a vector.

    y = time embedding + W·hidden   each block: x += gate(y) · MLP(LN(x)·(1 + scale(y)) + shift(y))

If all samples of a position have the same time, as in sampling, y has no sample dimension and is computed once.
"""

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from calm.autoencoder import Autoencoder, Posterior, matmul_flops
from calm.heads.base import FORWARD_AND_BACKWARD, NORM_EPS, HeadConfig, VectorHead, xavier_init, zero_init
from calm.noise import NoiseSource, draw_normal

FREQUENCIES = 128
LONGEST_PERIOD = 10_000.0
TIMES = 1000  # times are integers below this


def sinusoids(times: Tensor) -> Tensor:
    """Times (...) of 0 to 1000 → cosines and sines (..., 256)."""
    index = torch.arange(FREQUENCIES, device=times.device, dtype=torch.float32)
    angles = times[..., None].float() * torch.exp(-math.log(LONGEST_PERIOD) / FREQUENCIES * index)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class DenoisingBlock(nn.Module):
    """Residual MLP on x (..., H), modulated by the condition y (..., H)."""

    def __init__(self, size: int):
        super().__init__()
        self.norm = nn.LayerNorm(size, eps=NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size))
        self.modulation = nn.Linear(size, 3 * size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(y)).chunk(3, dim=-1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


def time_embedding(size: int) -> nn.Sequential:
    """MLP on `sinusoids` of times: (..., 256) → (..., size)."""
    return nn.Sequential(nn.Linear(2 * FREQUENCIES, size), nn.SiLU(), nn.Linear(size, size))


class Denoiser(nn.Module):
    """The network of the module's docstring.

    Args:
        hidden_size: H of the hidden states, and of the blocks.
        latent_size: Z of the vectors.
        output_size: of the output; diffusion predicts two numbers per dimension.
        num_layers: number of blocks.
    """

    def __init__(self, hidden_size: int, latent_size: int, output_size: int, num_layers: int):
        super().__init__()
        size = hidden_size
        self.time = time_embedding(size)
        self.condition = nn.Linear(hidden_size, size)
        self.input = nn.Linear(latent_size, size)
        self.blocks = nn.ModuleList(DenoisingBlock(size) for _ in range(num_layers))
        self.norm = nn.LayerNorm(size, eps=NORM_EPS, elementwise_affine=False)
        self.modulation = nn.Linear(size, 2 * size)
        self.output = nn.Linear(size, output_size)

    def reset_parameters(self) -> None:
        """Blocks start as the identity, and the output at zero."""
        xavier_init(self)
        for block in self.blocks:
            zero_init(block.modulation)  # pyright: ignore[reportArgumentType]
        zero_init(self.modulation)
        zero_init(self.output)

    def forward(self, x: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        """Vectors (N, ..., Z), integer times that broadcast to (N, ...), `self.condition` of the hidden states."""
        return self.refine(x, self.time(sinusoids(times).to(condition.dtype)) + condition)

    def flops(self) -> tuple[float, float]:
        """FLOPs per position of what all samples share, and of each sample with a time of its own."""
        once = matmul_flops(self.condition)
        return once, matmul_flops(self) - once

    def sampling_flops(self) -> tuple[float, float]:
        """FLOPs per position of an evaluation in sampling: what all samples share, and each sample."""
        blocks: Any = self.blocks
        modulation = matmul_flops(self.modulation, *(block.modulation for block in blocks))
        return modulation, matmul_flops(self.input, self.output, *(block.mlp for block in blocks))

    def refine(self, x: Tensor, y: Tensor) -> Tensor:
        """The blocks and the output: vectors (N, ..., Z), conditions (..., H) → (N, ..., output_size)."""
        x = self.input(x)
        for block in self.blocks:
            x = block(x, y)
        shift, scale = self.modulation(F.silu(y)).chunk(2, dim=-1)
        return self.output(self.norm(x) * (1 + scale) + shift)


class DenoisingConfig(HeadConfig):
    num_model_samples: int = Field(8, ge=1, description="N, draws of time and noise per position in training")


class DenoisingHead(VectorHead):
    """A head that learns to turn noise into latents, step by step or at once."""

    Config = DenoisingConfig
    derivative_passes = 0  # further forward passes that the training loss takes

    def __init__(self, config: Any, denoiser: Denoiser, autoencoder: Autoencoder | None):
        super().__init__(config, autoencoder)
        self.denoiser = denoiser
        self.num_model_samples = config.num_model_samples

    def reset_parameters(self) -> None:
        self.denoiser.reset_parameters()

    def compile_units(self) -> list[nn.Module]:
        return list(self.denoiser.blocks)

    def quantizable(self) -> list[nn.Module]:
        return [self.denoiser.blocks]  # a quantized time embedding would refuse a single time

    @property
    def num_evaluations(self) -> int:
        """Calls of the denoiser per sample."""
        return 1

    def draw_pairs(self, hidden: Tensor, posterior: Posterior, generator: NoiseSource) -> tuple[Tensor, Tensor]:
        """Targets and noise for N repeats of each position: (N, ..., Z) twice."""
        count = self.num_model_samples
        target = posterior.float().sample(draw_normal(generator, hidden, count, self.latent_size))
        return target, draw_normal(generator, hidden, count, self.latent_size)

    def sample_flops(self) -> tuple[float, float, float]:
        """In sampling all samples share the time, and with it the modulation; its embedding is one vector for all."""
        once, every = self.denoiser.flops()
        evaluation, sample = self.denoiser.sampling_flops()
        passes = FORWARD_AND_BACKWARD + self.derivative_passes
        training = passes * (once + self.num_model_samples * every)
        return training, once + self.num_evaluations * (evaluation + sample), self.num_evaluations * sample

    def activation_size(self) -> float:
        size, layers = self.denoiser.condition.in_features, len(self.denoiser.blocks)
        return self.num_model_samples * ((13 * layers + 6) * size + 6 * self.latent_size)
