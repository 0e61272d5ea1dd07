"""What all heads share."""

import torch
from torch import Tensor, nn

NORM_EPS = 1e-6


def masked_mean(losses: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of losses (..., L) over positions whose mask is 1; what the others hold does not matter."""
    if mask is None:
        return losses.mean()
    return torch.where(mask > 0, losses, 0.0).sum() / mask.sum().clamp(min=1)


def initialize_linears(module: nn.Module) -> None:
    """Uniform weights scaled by width (Xavier), biases zero: small and large heads start alike."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def start_at_zero(linear: nn.Linear) -> None:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
