"""The energy head of §3.3: noise, refined by residual blocks on the condition, is a sample. One pass, no iteration.

    x = LN(W·noise)   y = LN(W·hidden)   each block: x += SwiGLU(fuse(LN(x), y))   sample = MLP(LN(x))

All N samples of a position share its condition: whatever depends on y alone is computed once.
"""

import warnings

from torch import Tensor, nn
from torch.nn import functional as F

from calm.errors import CalmWarning
from calm.heads.common import NORM_EPS, initialize_linears, masked_mean, start_at_zero
from calm.models.posterior import Posterior
from calm.noise import Source, draw_uniform
from calm.scores.energy import check_energy, energy_loss


class Block(nn.Module):
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


class EnergyHead(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        latent_size: int,
        num_layers: int,
        *,
        noise_size: int = 64,
        num_model_samples: int = 8,  # N
        num_target_samples: int | None = None,  # M; None: closed form
        alpha: float = 1.0,
    ):
        super().__init__()
        if warning := check_energy(alpha, num_model_samples):
            warnings.warn(warning, CalmWarning, stacklevel=2)
        self.noise_size, self.alpha = noise_size, alpha
        self.num_model_samples, self.num_target_samples = num_model_samples, num_target_samples
        self.noise = nn.Linear(noise_size, hidden_size)
        self.noise_norm = nn.LayerNorm(hidden_size, eps=NORM_EPS)
        self.condition = nn.Linear(hidden_size, hidden_size)
        self.condition_norm = nn.LayerNorm(hidden_size, eps=NORM_EPS)
        self.blocks = nn.ModuleList(Block(hidden_size) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size, eps=NORM_EPS)
        self.mix = nn.Linear(hidden_size, hidden_size)
        self.latent = nn.Linear(hidden_size, latent_size)

    def initialize(self) -> None:
        initialize_linears(self)
        start_at_zero(self.latent)

    def sample(
        self, hidden: Tensor, num_samples: int = 1, generator: Source = None, noise: Tensor | None = None
    ) -> Tensor:
        """Hidden states (..., H) → latents (N, ..., Z). Noise (N, ..., noise_size) in [-0.5, 0.5] may be given."""
        if noise is None:
            noise = draw_uniform(generator, hidden, num_samples, self.noise_size) - 0.5
        x = self.noise_norm(self.noise(noise.to(hidden.dtype)))
        y = self.condition_norm(self.condition(hidden))
        for block in self.blocks:
            x = block(x, y)
        return self.latent(F.silu(self.mix(self.norm(x))))

    def loss(
        self, hidden: Tensor, posterior: Posterior, mask: Tensor | None = None, generator: Source = None
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
