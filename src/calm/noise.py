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


Source = torch.Generator | RowNoise | None  # who is asked for noise; None is torch's global generator


def draw_normal(source: Source, like: Tensor, count: int, size: int) -> Tensor:
    """Standard normal noise for `count` samples at each position of `like` (..., any): (count, ..., size)."""
    return _draw(torch.randn, source, like, count, size)


def draw_uniform(source: Source, like: Tensor, count: int, size: int) -> Tensor:
    """Noise uniform in [0, 1) for `count` samples at each position of `like` (..., any): (count, ..., size)."""
    return _draw(torch.rand, source, like, count, size)


def _draw(function, source: Source, like: Tensor, count: int, size: int) -> Tensor:
    shape = like.shape[:-1]
    if isinstance(source, RowNoise):
        return source._draw(function, (count, *shape[1:], size), like.dtype).movedim(0, 1)
    device = like.device if source is None else source.device
    noise = function((count, *shape, size), generator=source, device=device, dtype=like.dtype)
    return noise.to(like.device)
