"""AdamW as in the paper (§7.1): weight decay on matrices only, linear warmup and a learning rate schedule."""

import math
from typing import Literal

import torch
from torch import nn

Schedule = Literal["constant", "cosine", "linear"]


def adamw(model: nn.Module, betas: tuple[float, float], eps: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW for the trainable parameters. The training loop sets the learning rate at every step."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def learning_rate(step: int, steps: int, peak: float, warmup: int, schedule: Schedule) -> float:
    """Linear warmup to `peak`, then constant (as in the paper), or cosine or linear decay to zero at the end."""
    if step < warmup:
        return peak * (step + 1) / warmup
    remaining = (steps - step) / max(1, steps - warmup)
    return peak * {"constant": 1.0, "linear": remaining, "cosine": 0.5 - 0.5 * math.cos(math.pi * remaining)}[schedule]
