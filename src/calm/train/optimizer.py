"""AdamW as the paper uses it (§7.1): weight decay on matrices only, warm-up, then a schedule."""

import math
from typing import Literal

import torch
from torch import nn

Schedule = Literal["constant", "cosine", "linear"]


def adamw(model: nn.Module, betas: tuple[float, float], eps: float, weight_decay: float) -> torch.optim.AdamW:
    """The learning rate is set at every step by `learning_rate`."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def learning_rate(step: int, steps: int, peak: float, warmup: int, schedule: Schedule) -> float:
    """Linear warm-up to `peak`, then constant (the paper's), or down to zero at the last step by a cosine or a line."""
    if step < warmup:
        return peak * (step + 1) / warmup
    left = (steps - step) / max(1, steps - warmup)
    return peak * {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[schedule]
