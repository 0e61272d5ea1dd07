"""Algorithm 1 of §5: exact samples of P(x)^(1/T), normalized, from samples of P alone, by rejection.

    1/T = n + fraction     n draws that are all the same: probability P(x)^n
                           then a coin that shows heads with probability P(x)^fraction (a Bernoulli factory)

The expected number of draws is Theorem 2.
"""

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from calm.errors import CalmWarning, ConfigError
from calm.generate.temperature import SamplingStats, inverse, sample_from_candidates

MAX_DRAWS = 100_000
LARGEST_BLOCK = 4096


def expected_draws(probabilities: Tensor, temperature: float) -> float:
    """Theorem 2: the expected number of draws of Algorithm 1 for a known distribution."""
    s, p = inverse(temperature), probabilities.double()
    p = p[p > 0]
    second = float((p ** (s - 1)).sum()) if s % 1 else 0.0
    return (math.floor(s) + second) / float((p**s).sum())


def sample_at_temperature(
    draw: Callable[[int], Tensor],
    temperature: float,
    *,
    generator: torch.Generator | None = None,
    block: int = 64,
    max_draws: int = MAX_DRAWS,
) -> tuple[Tensor, SamplingStats]:
    """Algorithm 1: one chunk from a black box. Warns if it is approximate.

    Args:
        draw: draw(n) → n independent draws (n, K).
        temperature: in (0, 1].
        block: draws per call at first; the size of blocks does not affect the result.
        max_draws: after this many draws Algorithm 2 selects from all of them, and the statistics say unsettled.

    Returns:
        A chunk (K,), and statistics.

    Example:
        >>> chunk, stats = sample_at_temperature(lambda n: my_model.sample(prompt, n), 0.5)
    """
    chunk, stats = sample_by_rejection(draw, temperature, generator, block, max_draws)
    if bool(stats.unsettled):
        warnings.warn(
            f"exact sampling stopped after {int(stats.draws)} draws, so the chunk is approximate; allow more with "
            "max_draws",
            CalmWarning,
            stacklevel=2,
        )
    return chunk, stats


def sample_by_rejection(
    draw: Callable[[int], Tensor],
    temperature: float,
    generator: torch.Generator | None = None,
    block: int = 64,
    max_draws: int = MAX_DRAWS,
) -> tuple[Tensor, SamplingStats]:
    """`sample_at_temperature` for callers that count the approximate chunks."""
    s = inverse(temperature)
    n, fraction = math.floor(s), s % 1
    if max_draws < 1:
        raise ConfigError(f"max_draws must be at least 1, not {max_draws}")
    if 0.5 < temperature < 1:
        warnings.warn(
            f"exact sampling at temperature {temperature} may need as many draws as there are chunks; it is cheaper at "
            "0.5 and below, and the method 'batch' is cheap at every temperature",
            CalmWarning,
            stacklevel=3,
        )
    draws = _Draws(draw, max(block, n), max_draws)
    try:
        while True:
            chunk = _same_n_times(draws, n)
            if not fraction or _bernoulli_factory(draws, chunk, fraction, generator):
                return chunk, SamplingStats(torch.tensor([draws.used]), torch.tensor([0]), torch.tensor([False]))
    except _Exhausted:
        chunks, cost = sample_from_candidates(torch.cat(draws.blocks)[None], s, generator=generator)
        return chunks[0], SamplingStats(cost.draws, cost.fallbacks, torch.ones_like(cost.unsettled))


def _same_n_times(draws: "_Draws", n: int) -> Tensor:
    """Stage 1: the first group of n draws that are all the same."""
    while True:
        ahead = draws.ahead(n)
        groups = ahead[: len(ahead) // n * n].unflatten(0, (-1, n))
        same = (groups == groups[:, :1]).flatten(1).all(1)
        if bool(same.any()):
            first = int(same.byte().argmax())
            draws.use((first + 1) * n)
            return groups[first, 0]
        draws.use(len(groups) * n)


def _bernoulli_factory(draws: "_Draws", chunk: Tensor, fraction: float, generator: torch.Generator | None) -> bool:
    """Stage 2, a Bernoulli factory: true with probability P(chunk)^fraction."""
    i = 1
    while True:
        ahead = draws.ahead(1)
        hits = (ahead == chunk).flatten(1).all(1)
        tries = torch.arange(i, i + len(ahead), dtype=torch.double)
        device = None if generator is None else generator.device
        uniform = torch.rand(len(ahead), generator=generator, device=device, dtype=torch.double).cpu()
        ended = hits | (uniform < fraction / tries).to(hits.device)
        if bool(ended.any()):
            first = int(ended.byte().argmax())
            draws.use(first + 1)
            return bool(hits[first])
        draws.use(len(ahead))
        i += len(ahead)


class _Exhausted(Exception):
    pass


class _Draws:
    """Independent draws in order, fetched in blocks of growing size."""

    def __init__(self, draw: Callable[[int], Tensor], block: int, most: int):
        self.draw, self.block, self.most = draw, block, most
        self.blocks: list[Tensor] = []
        self.fetched: Tensor | None = None  # but not used yet
        self.used = 0

    def ahead(self, count: int) -> Tensor:
        """At least `count` unused draws."""
        while self.fetched is None or len(self.fetched) < count:
            block = min(self.block, self.most - sum(map(len, self.blocks)))
            if block < 1:
                raise _Exhausted
            new = self.draw(block)
            if len(new) != block:
                raise ConfigError(f"draw({block}) should return {block} draws, not {len(new)}")
            self.blocks.append(new)
            self.fetched = new if self.fetched is None else torch.cat([self.fetched, new])
            self.block = min(2 * self.block, LARGEST_BLOCK)
        return self.fetched

    def use(self, count: int) -> None:
        assert self.fetched is not None
        self.fetched = self.fetched[count:]
        self.used += count
