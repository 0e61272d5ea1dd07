"""Randomness that belongs to the data: every row of a batch draws from a generator of its own.

A row is seeded by (seed, its number since the beginning of training), so whichever process holds it, in whatever
batch, it meets the same noise, the same dropout and the same samples.
"""

import torch
from torch import Tensor


class RowNoise:
    """One generator a row; what is drawn has the rows as its first dimension."""

    def __init__(self, seeds: list[int], device: torch.device | str = "cpu"):
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    @classmethod
    def fresh(cls, rows: int, device: torch.device | str = "cpu") -> "RowNoise":
        """Rows seeded from torch's global generator, for use outside of the training loop."""
        return cls(torch.randint(2**62, (rows,)).tolist(), device)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._draw(torch.randn, shape, dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._draw(torch.rand, shape, dtype)

    def _draw(self, function, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        drawn = [function(shape, generator=g, device=g.device, dtype=dtype) for g in self.generators]
        return torch.stack(drawn)  # (B, *shape)
