"""Randomness that belongs to the data: every row of a batch draws from a generator of its own.

A row is seeded by (seed, its number since the beginning of training), so whichever process holds it, in whatever
batch, it meets the same noise, the same dropout and the same samples.
"""

import torch
from torch import Tensor


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Outcomes with probability proportional to weights (A, V), by where uniform numbers (A, C) fall: (A, C)."""
    cumulated = weights.cumsum(-1)
    place = torch.searchsorted(cumulated, uniform.to(weights.dtype) * cumulated[:, -1:], right=True)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)  # that can come out
    return place.minimum(last)


class RowNoise:
    """One generator a row; what is drawn has the rows as its first dimension."""

    def __init__(self, seeds: list[int], device: torch.device | str = "cpu"):
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    @classmethod
    def fresh(cls, rows: int, device: torch.device | str = "cpu") -> "RowNoise":
        """Rows seeded from torch's global generator, for use outside of the training loop."""
        return cls(torch.randint(2**62, (rows,)).tolist(), device)

    def rows(self, places: list[int]) -> "RowNoise":
        """Some of the rows, which go on where they are."""
        chosen = RowNoise([])
        chosen.generators = [self.generators[place] for place in places]
        return chosen

    @classmethod
    def together(cls, parts: "list[RowNoise]") -> "RowNoise":
        """The rows of several."""
        joined = cls([])
        joined.generators = [generator for part in parts for generator in part.generators]
        return joined

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.draw(torch.randn, shape).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return self.draw(torch.rand, shape)

    def draw(self, function, shape: tuple[int, ...]) -> Tensor:
        """What torch.randn or torch.rand give for each row, in fp32: bf16 has too few numbers to draw from."""
        return torch.stack([function(shape, generator=g, device=g.device) for g in self.generators])  # (B, *shape)


class ScaledNoise(RowNoise):
    """Noise drawn nearer to its middle, by a factor: 0 for normal, a half for uniform numbers."""

    def __init__(self, noise: RowNoise, scale: float):
        self.generators, self.scale = noise.generators, scale

    def rows(self, places: list[int]) -> "ScaledNoise":
        return ScaledNoise(super().rows(places), self.scale)

    def draw(self, function, shape: tuple[int, ...]) -> Tensor:
        middle = 0.0 if function is torch.randn else 0.5
        return middle + self.scale * (super().draw(function, shape) - middle)


Source = torch.Generator | RowNoise | None  # who is asked for noise; None is torch's global generator


def draw_normal(source: Source, like: Tensor, count: int, size: int) -> Tensor:
    """Standard normal noise, in fp32, for `count` samples at each position of `like` (..., any): (count, ..., size)."""
    return _draw(torch.randn, source, like, count, size)


def draw_uniform(source: Source, like: Tensor, count: int, size: int) -> Tensor:
    """The same, uniform in [0, 1)."""
    return _draw(torch.rand, source, like, count, size)


def _draw(function, source: Source, like: Tensor, count: int, size: int) -> Tensor:
    shape = like.shape[:-1]
    if isinstance(source, RowNoise):
        return source.draw(function, (count, *shape[1:], size)).movedim(0, 1)
    device = like.device if source is None else source.device
    return function((count, *shape, size), generator=source, device=device).to(like.device)
