"""What all evaluations share."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from calm.data.loader import Batch


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode and without gradients, and afterwards as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def on_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and mask of a batch: (B, T) and (B, T)."""
    return torch.from_numpy(batch.tokens).to(device), torch.from_numpy(batch.mask).to(device)
