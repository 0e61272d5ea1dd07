"""Candidates for the next chunk of each text, known only as far as somebody asks.

A pool holds draws for B rows, which may have grown differently. The token at a position is found when it is first asked
for: a candidate whose beginning already rules it out is never decoded to its end.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from calm.errors import ConfigError

UNKNOWN = -1


class Candidates:
    """Given ones (B, N, K), or those of a black box: draw(n) → (B, n, K)."""

    def __init__(self, given: Tensor, draw: Callable[[int], Tensor] | None = None):
        self.known = given  # (B, N, K), UNKNOWN where nobody has asked
        self.there = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)  # (B, N)
        self.draw = draw

    def grow(self, count: int, rows: Tensor) -> None:
        """So many more candidates for some rows (B,)."""
        new = self.drawn(count, rows)  # (B, count, K); what stands in other rows does not matter
        self.known = torch.cat([self.known, new], dim=1)
        self.there = torch.cat([self.there, rows[:, None].expand(-1, count)], dim=1)

    def drawn(self, count: int, rows: Tensor) -> Tensor:
        if self.draw is None:
            raise ConfigError("candidates that are given cannot be refilled; make Candidates with a function to draw")
        return self.draw(count)

    def tokens(self, position: int, places: tuple[Tensor, ...]) -> Tensor:
        """The tokens of some candidates (row, number) at one position: (n,)."""
        tokens = self.known[*places, position]
        if bool((missing := tokens == UNKNOWN).any()):
            wanted = places[0][missing], places[1][missing]
            tokens[missing] = self.known[*wanted, position] = self.decode(wanted, position, position + 1)[:, 0]
        return tokens

    def rest(self, first: int, places: tuple[Tensor, ...]) -> Tensor:
        """The tokens of some candidates from a position on, all at once: (n, K - first)."""
        tokens = self.known[*places][:, first:]
        if bool((tokens == UNKNOWN).any()):
            tokens = self.decode(places, first, self.known.shape[-1])
        return tokens

    def decode(self, places: tuple[Tensor, ...], first: int, last: int) -> Tensor:
        """Find the tokens of some candidates from `first` to before `last`: (n, last - first)."""
        raise AssertionError("candidates that are given are known")
