"""Random numbers per row: every row of a batch has its own generator.

In training a row is seeded by (seed, its number since the start), in generation by (seed, its number in the request),
so its noise, dropout, and samples do not depend on the process or the batch that it is in.
"""

import torch
from torch import Tensor


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample indices with probability proportional to weights (A, V), by uniform numbers (A, C): (A, C)."""
    cumulative = weights.cumsum(-1)
    place = torch.searchsorted(cumulative, uniform.to(weights.dtype) * cumulative[:, -1:], right=True)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)  # with a weight
    return place.minimum(last)


class RowNoise:
    """One generator per row; the first dimension of all draws is the row."""

    def __init__(self, seeds: list[int], device: torch.device | str = "cpu"):
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    @classmethod
    def fresh(cls, rows: int, device: torch.device | str = "cpu") -> "RowNoise":
        """Rows seeded from torch's global generator, for use outside the training loop."""
        return cls(torch.randint(2**62, (rows,)).tolist(), device)

    def rows(self, places: list[int]) -> "RowNoise":
        """Some of the rows; they share their generators' state."""
        chosen = RowNoise([])
        chosen.generators = [self.generators[place] for place in places]
        return chosen

    @classmethod
    def concat(cls, parts: "list[RowNoise]") -> "RowNoise":
        """The rows of several sources."""
        joined = cls([])
        joined.generators = [generator for part in parts for generator in part.generators]
        return joined

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.draw(torch.randn, shape).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return self.draw(torch.rand, shape)

    def draw(self, function, shape: tuple[int, ...]) -> Tensor:
        """Draws of torch.randn or torch.rand for each row (B, *shape), in fp32: bf16 has too few values."""
        return torch.stack([function(shape, generator=g, device=g.device) for g in self.generators])  # (B, *shape)


class ScaledNoise(RowNoise):
    """Noise scaled towards its mean, which is 0 for normal and 0.5 for uniform numbers; the scale of each row (B,)."""

    def __init__(self, noise: RowNoise, scale: Tensor):
        self.generators, self.scale = noise.generators, scale

    def rows(self, places: list[int]) -> "ScaledNoise":
        return ScaledNoise(super().rows(places), self.scale[places])

    def draw(self, function, shape: tuple[int, ...]) -> Tensor:
        middle = 0.0 if function is torch.randn else 0.5
        scale = self.scale.view(-1, *[1] * len(shape))
        return middle + scale * (super().draw(function, shape) - middle)


NoiseSource = torch.Generator | RowNoise | None  # None: torch's global generator


def draw_normal(source: NoiseSource, like: Tensor, count: int, size: int) -> Tensor:
    """Standard normal noise in fp32, `count` samples at each position of `like` (..., any): (count, ..., size)."""
    return _draw(torch.randn, source, like, count, size)


def draw_uniform(source: NoiseSource, like: Tensor, count: int, size: int) -> Tensor:
    """The same, uniform in [0, 1)."""
    return _draw(torch.rand, source, like, count, size)


def _draw(function, source: NoiseSource, like: Tensor, count: int, size: int) -> Tensor:
    shape = like.shape[:-1]
    if isinstance(source, RowNoise):
        return source.draw(function, (count, *shape[1:], size)).movedim(0, 1)
    device = like.device if source is None else source.device
    return function((count, *shape, size), generator=source, device=device).to(like.device)
