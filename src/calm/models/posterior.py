"""q(z|x): what the encoder says of a chunk, a diagonal Gaussian over its latent vector (§2.2)."""

from typing import NamedTuple

import torch
from torch import Tensor


class Posterior(NamedTuple):
    mean: Tensor  # (..., Z)
    log_std: Tensor  # (..., Z); minus infinity where the autoencoder is not variational

    @property
    def std(self) -> Tensor:
        return self.log_std.exp()

    def sample(self, noise: Tensor) -> Tensor:
        """mean + std·noise, for standard normal noise of any shape that broadcasts."""
        return self.mean + self.std * noise

    def kl(self) -> Tensor:
        """KL divergence to the standard normal prior, in each dimension: (..., Z)."""
        return 0.5 * (self.mean**2 + (2 * self.log_std).exp() - 1) - self.log_std

    def float(self) -> "Posterior":
        return Posterior(self.mean.float(), self.log_std.float())


def floored_kl(posterior: Posterior, floor: float) -> Tensor:
    """The KL of a chunk with every dimension's share clipped from below, so that none is worth collapsing: (...)."""
    return posterior.kl().clamp(min=floor).sum(-1) if floor else posterior.kl().sum(-1)


def drop(latents: Tensor, uniform: Tensor, rate: float) -> Tensor:
    """Dropout of latent dimensions, given uniform noise; what stays is scaled up."""
    return torch.where(uniform < rate, 0, latents / (1 - rate))
