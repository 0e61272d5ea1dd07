"""Algorithm 1 of §5: P(x)^(1/T), normalised, exactly, from draws of P alone, by rejection.

    1/T = n + fraction     n draws that are all the same: with probability P(x)^n
                           then a coin that shows heads with probability P(x)^fraction (a Bernoulli factory)

Nobody can say how many draws that takes but on average, and that is Theorem 2.
"""

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from calm.errors import CalmWarning, ConfigError
from calm.sampling.temperature import Cost, inverse, sample_from_candidates

MOST_DRAWS = 100_000
LARGEST_BLOCK = 4096


def expected_draws(probabilities: Tensor, temperature: float) -> float:
    """Theorem 2: the draws that Algorithm 1 needs on average for a known distribution."""
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
    most_draws: int = MOST_DRAWS,
) -> tuple[Tensor, Cost]:
    """Algorithm 1: one chunk (K,) from `draw(n)` → n independent draws (n, K), and what it cost.

    Draws are fetched in blocks and used in their order, so the blocks change nothing. After `most_draws` it gives up
    and takes what Algorithm 2 makes of all that were drawn; the cost then says unsettled.
    """
    s = inverse(temperature)
    n, fraction = math.floor(s), s % 1
    if most_draws < 1:
        raise ConfigError(f"most_draws must be at least 1, not {most_draws}")
    if 0.5 < temperature < 1:
        warnings.warn(
            f"exact sampling at temperature {temperature} may need as many draws as there are chunks; at 0.5 and below "
            "it is cheaper, and batches are cheap everywhere",
            CalmWarning,
            stacklevel=2,
        )
    draws = _Draws(draw, max(block, n), most_draws)
    try:
        while True:
            chunk = _same_n_times(draws, n)
            if not fraction or _coin(draws, chunk, fraction, generator):
                return chunk, Cost(torch.tensor([draws.used]), torch.tensor([0]), torch.tensor([False]))
    except _Exhausted:
        chunks, cost = sample_from_candidates(torch.cat(draws.blocks)[None], s, generator=generator)
        return chunks[0], Cost(cost.draws, cost.fallbacks, torch.ones_like(cost.unsettled))


def _same_n_times(draws: "_Draws", n: int) -> Tensor:
    """Stage 1 of Algorithm 1: the first of the next groups of n draws that are all the same."""
    while True:
        ahead = draws.ahead(n)
        groups = ahead[: len(ahead) // n * n].unflatten(0, (-1, n))
        same = (groups == groups[:, :1]).flatten(1).all(1)
        if bool(same.any()):
            first = int(same.byte().argmax())
            draws.use((first + 1) * n)
            return groups[first, 0]
        draws.use(len(groups) * n)


def _coin(draws: "_Draws", chunk: Tensor, fraction: float, generator: torch.Generator | None) -> bool:
    """Stage 2, a Bernoulli factory: heads with probability P(chunk)^fraction."""
    i = 1
    while True:
        ahead = draws.ahead(1)
        heads = (ahead == chunk).flatten(1).all(1)
        tries = torch.arange(i, i + len(ahead), dtype=torch.double)
        device = None if generator is None else generator.device
        uniform = torch.rand(len(ahead), generator=generator, device=device, dtype=torch.double).cpu()
        ended = heads | (uniform < fraction / tries).to(heads.device)
        if bool(ended.any()):
            first = int(ended.byte().argmax())
            draws.use(first + 1)
            return bool(heads[first])
        draws.use(len(ahead))
        i += len(ahead)


class _Exhausted(Exception):
    pass


class _Draws:
    """Independent draws in their order, fetched in blocks that grow."""

    def __init__(self, draw: Callable[[int], Tensor], block: int, most: int):
        self.draw, self.block, self.most = draw, block, most
        self.blocks: list[Tensor] = []
        self.fetched: Tensor | None = None  # and not used
        self.used = 0

    def ahead(self, count: int) -> Tensor:
        """At least so many draws that nobody has used."""
        while self.fetched is None or len(self.fetched) < count:
            block = min(self.block, self.most - sum(map(len, self.blocks)))
            if block < 1:
                raise _Exhausted
            new = self.draw(block)
            if len(new) != block:
                raise ConfigError(f"draw({block}) should return so many draws, not {len(new)}")
            self.blocks.append(new)
            self.fetched = new if self.fetched is None else torch.cat([self.fetched, new])
            self.block = min(2 * self.block, LARGEST_BLOCK)
        return self.fetched

    def use(self, count: int) -> None:
        assert self.fetched is not None
        self.fetched = self.fetched[count:]
        self.used += count
