"""A head that learns to use its noise, beyond the paper: a conditional variational autoencoder around the decoder.

    recognition   q(noise | chunk, hidden), a Gaussian     latent = network(noise, hidden)     tokens = decoder(latent)
    -log P(chunk | hidden)  ≤  E_q[nats of its tokens] + KL(q | normal noise)

The energy score compares latents, and at small scale sees the fine structure of the codewords last. Here the tokens
themselves are compared, and each chunk says which noise stands for it, so that one draw a position is enough.
"""

import torch
from torch import Tensor, nn

from calm.heads.common import start_at_zero
from calm.heads.energy import NoiseHead
from calm.models.posterior import Posterior
from calm.noise import Source, draw_normal

SPREAD = (-6.0, 2.0)  # bounds of log_std, so that no chunk claims a point of the noise for itself


class VariationalHead(NoiseHead):
    def __init__(self, hidden_size: int, latent_size: int, num_layers: int, *, noise_size: int = 64):
        super().__init__(hidden_size, latent_size, num_layers, noise_size)
        self.recognition = nn.Sequential(
            nn.Linear(hidden_size + latent_size, 2 * hidden_size),
            nn.SiLU(),
            nn.Linear(2 * hidden_size, 2 * hidden_size),
            nn.SiLU(),
            nn.Linear(2 * hidden_size, 2 * noise_size),
        )

    def initialize(self) -> None:
        super().initialize()
        start_at_zero(self.recognition[-1])  # pyright: ignore[reportArgumentType]

    def draw(self, hidden: Tensor, num_samples: int, generator: Source) -> Tensor:
        """Standard normal."""
        return draw_normal(generator, hidden, num_samples, self.noise_size)

    def recognise(self, hidden: Tensor, target: Tensor) -> Posterior:
        """The noise that stands for a chunk with latent (..., Z) behind hidden states (..., H)."""
        mean, log_std = self.recognition(torch.cat([hidden, target.to(hidden.dtype)], dim=-1)).float().chunk(2, dim=-1)
        return Posterior(mean, log_std.clamp(*SPREAD))
