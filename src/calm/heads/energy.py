"""The energy head of §3.3: residual blocks turn noise into a sample, given the hidden state. One forward pass.

    x = LN(W·noise)   y = LN(W·hidden)   each block: x += SwiGLU(fuse(LN(x), y))   sample = MLP(LN(x))

All N samples of a position share its condition: what depends on y alone is computed once.
"""

import warnings
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from calm.autoencoder import Autoencoder, Posterior, matmul_flops
from calm.errors import CalmWarning
from calm.heads.base import (
    FORWARD_AND_BACKWARD,
    NORM_EPS,
    HeadConfig,
    VectorHead,
    masked_mean,
    xavier_init,
    zero_init,
)
from calm.noise import NoiseSource, draw_normal, draw_uniform
from calm.scores.energy import check_energy, energy_loss, energy_loss_of_samples
from calm.scores.vocabulary import VocabularySubset


class EnergyBlock(nn.Module):
    """x + SwiGLU of a two-layer fusion of LN(x) and the condition; about 6·H² parameters."""

    def __init__(self, size: int):
        super().__init__()
        self.norm = nn.LayerNorm(size, eps=NORM_EPS)
        self.fuse_state = nn.Linear(size, size, bias=False)
        self.fuse_condition = nn.Linear(size, size)
        self.mix = nn.Linear(size, size)
        self.gate_up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(size, size)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        fused = self.fuse_state(self.norm(x)) + self.fuse_condition(condition)  # (N, ..., H) + (..., H)
        gate, up = self.gate_up(F.silu(self.mix(F.silu(fused)))).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class EnergyConfig(HeadConfig):
    num_model_samples: int = Field(8, ge=1, description="N, model samples per position in the energy loss")
    num_target_samples: int | None = Field(
        None, ge=1, description="M, target samples per position in the energy loss; null: closed form"
    )
    alpha: float = Field(1.0, description="exponent of the energy score, in (0, 2]")
    noise_size: int = Field(64, ge=1, description="dimensions of the noise")

    @model_validator(mode="after")
    def _proper(self) -> "EnergyConfig":
        check_energy(self.alpha, self.num_model_samples)
        return self


class EnergyHead(VectorHead):
    """The paper's head (§3.3): one forward pass from noise to a latent vector, trained with the energy score.

    Args:
        config: needs `hidden_size`, `latent_size`, `num_head_layers`, and the fields of `EnergyConfig`.
        autoencoder: the frozen autoencoder; None for use without tokens.

    Example:
        >>> head.sample(hidden, 8).shape  # hidden (B, L, H)
        torch.Size([8, B, L, Z])
    """

    Config = EnergyConfig

    def __init__(self, config: Any, autoencoder: Autoencoder | None = None):
        super().__init__(config, autoencoder)
        if warning := check_energy(config.alpha, config.num_model_samples):
            warnings.warn(warning, CalmWarning, stacklevel=2)
        size = config.hidden_size
        self.noise_size, self.alpha = config.noise_size, config.alpha
        self.num_model_samples, self.num_target_samples = config.num_model_samples, config.num_target_samples
        self.noise = nn.Linear(config.noise_size, size)
        self.noise_norm = nn.LayerNorm(size, eps=NORM_EPS)
        self.condition = nn.Linear(size, size)
        self.condition_norm = nn.LayerNorm(size, eps=NORM_EPS)
        self.blocks = nn.ModuleList(EnergyBlock(size) for _ in range(config.num_head_layers))
        self.norm = nn.LayerNorm(size, eps=NORM_EPS)
        self.mix = nn.Linear(size, size)
        self.latent = nn.Linear(size, config.latent_size)

    def reset_parameters(self) -> None:
        xavier_init(self)
        zero_init(self.latent)

    def sample(
        self, hidden: Tensor, num_samples: int = 1, generator: NoiseSource = None, noise: Tensor | None = None
    ) -> Tensor:
        """Hidden states (..., H) → latents (N, ..., Z). Noise (N, ..., noise_size) in [-0.5, 0.5] may be given."""
        if noise is None:
            noise = draw_uniform(generator, hidden, num_samples, self.noise_size) - 0.5
        x = self.noise_norm(self.noise(noise.to(hidden.dtype)))
        y = self.condition_norm(self.condition(hidden))
        for block in self.blocks:
            x = block(x, y)
        return self.latent(F.silu(self.mix(self.norm(x))))

    def latent_loss(
        self, hidden: Tensor, posterior: Posterior, mask: Tensor | None = None, generator: NoiseSource = None
    ) -> Tensor:
        """The energy loss, a mean over positions."""
        samples = self.sample(hidden, self.num_model_samples, generator)
        losses = energy_loss(
            samples,
            posterior,
            alpha=self.alpha,
            num_target_samples=self.num_target_samples,
            generator=generator,
        )
        return masked_mean(losses, mask)

    def samples_loss(
        self,
        hidden: Tensor,
        samples: Tensor,
        *,
        mask: Tensor | None = None,
        noise: NoiseSource = None,
        vocabulary: VocabularySubset | None = None,
    ) -> Tensor:
        """The energy loss between the model's samples and one posterior sample of each target: M·N pairs share both."""
        with torch.no_grad():
            posterior = self.autoencoder.encode(samples)  # (M, B, L, Z)
            targets = posterior.sample(
                draw_normal(noise, hidden, len(samples), self.latent_size).to(posterior.mean.dtype)
            )
        losses = energy_loss_of_samples(self.sample(hidden, self.num_model_samples, noise), targets, self.alpha)
        return masked_mean(losses, mask)

    def sample_flops(self) -> tuple[float, float, float]:
        blocks: Any = self.blocks
        once = matmul_flops(self.condition, *(block.fuse_condition for block in blocks))  # shared by all samples
        sample = matmul_flops(self) - once
        training = FORWARD_AND_BACKWARD * (once + self.num_model_samples * sample)
        return training, once + sample, sample

    def compile_units(self) -> list[nn.Module]:
        return list(self.blocks)

    def activation_size(self) -> float:
        size = self.mix.in_features
        return self.num_model_samples * ((13 * len(self.blocks) + 6) * size + 6 * self.latent_size)
