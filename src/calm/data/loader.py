"""Shards → batches. The batch of step s is a function of (seed, s) alone, so the state of a loader is one integer,
and any number of ranks reads the same global batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calm.data.chunks import ChunkedStream, Row
from calm.errors import DataError
from calm.seeds import SeedStream, hash64, permute

ROUND = 1000  # rows in which the weights of a mixture are kept exactly


class Batch(NamedTuple):
    tokens: np.ndarray  # (B, T) int64
    mask: np.ndarray  # (B, T) bool: false for fill
    rows: np.ndarray  # (B,) int64: the number of each row since the beginning of training; seeds its randomness


@dataclass(frozen=True)
class Loader:
    """Batches of one split, or of several mixed by weight."""

    streams: list[ChunkedStream]
    weights: list[float]
    batch_size: int  # rows of the global batch
    seed: int = 0
    front_fill: float = 1.0  # the share of rows that begin with 0 to K-1 fill ids
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if len({(s.chunk_size, s.sequence_length) for s in self.streams}) != 1:
            raise DataError("the sets of a mixture must have one chunk_size and one sequence_length")
        if any(len(stream) == 0 for stream in self.streams):
            raise DataError("a set of the mixture has no tokens in this split")
        if len(self.weights) != len(self.streams) or min(self._quotas()) < 1:
            raise DataError(f"every set needs a weight of at least a thousandth of their sum, not {self.weights}")
        if self.batch_size < 1 or self.batch_size % self.world_size:
            raise DataError(
                f"batch_size must be a positive multiple of the number of processes, "
                f"but {self.batch_size} is none of {self.world_size}"
            )

    def _quotas(self) -> np.ndarray:
        """How many of ROUND rows each set gives; largest remainders get what rounding leaves."""
        exact = np.asarray(self.weights, dtype=float) / np.sum(self.weights) * ROUND
        quotas = np.floor(exact).astype(np.int64)
        short = ROUND - quotas.sum()
        quotas[np.argsort(quotas - exact, kind="stable")[:short]] += 1
        return quotas

    def batch(self, step: int) -> Batch:
        """This rank's part of the global batch of a step."""
        return self.batch_and_whole(step, whole=False)[0]

    def batch_and_whole(self, step: int, whole: bool = True) -> tuple[Batch, Batch]:
        """This rank's part, and the global batch (or, where that is not wanted, the part again)."""
        share = self.batch_size // self.world_size
        mine = slice(self.rank * share, (self.rank + 1) * share)
        rows = step * self.batch_size + np.arange(self.batch_size)
        if not whole:
            rows, mine = rows[mine], slice(None)
        sets, places = self._places(rows)
        indices = self._indices(sets, places)
        fills = self._fills(rows)
        made = [self.streams[s].row(int(i), int(f)) for s, i, f in zip(sets, indices, fills, strict=True)]
        batch = _batch(made, rows)
        return Batch(*(part[mine] for part in batch)), batch

    def _places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each row: which set it comes from, and how many rows that set gave before."""
        if len(self.streams) == 1:
            return np.zeros_like(rows), rows
        quotas = self._quotas()
        ends = np.cumsum(quotas)
        slots = permute(rows % ROUND, ROUND, self.seed, SeedStream.MIXTURE, rows // ROUND)
        sets = np.searchsorted(ends, slots, side="right")
        return sets, rows // ROUND * quotas[sets] + slots - (ends - quotas)[sets]

    def _fills(self, rows: np.ndarray) -> np.ndarray:
        chosen = hash64(self.seed, SeedStream.FRONT_PADDING, rows) / 2.0**64 < self.front_fill
        return np.where(
            chosen, hash64(self.seed, SeedStream.FRONT_PADDING_LENGTH, rows) % np.uint64(self.streams[0].chunk_size), 0
        )

    def _indices(self, sets: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Which row of its set each place is: every epoch goes through a set in an order of its own."""
        indices = np.empty_like(places)
        for which, stream in enumerate(self.streams):
            here = sets == which
            epochs, within = np.divmod(places[here], len(stream))
            indices[here] = permute(within, len(stream), self.seed, SeedStream.ORDER, which, epochs)
        return indices


def _batch(made: list[Row], rows: np.ndarray) -> Batch:
    return Batch(np.stack([row.tokens for row in made]), np.stack([row.mask for row in made]), rows)


def evaluation_batches(
    stream: ChunkedStream, batch_size: int, rank: int = 0, world_size: int = 1, most_rows: int | None = None
) -> Iterator[Batch]:
    """The rows of a split once, in order, without front fill; ranks take turns. All of them, or the first so many."""
    if len(stream) == 0:
        raise DataError("this split has no tokens; prepare the data with a larger share for it")
    # All ranks get equally many rows, as collective operations need; those beyond the end hold only fill.
    count = len(stream) if most_rows is None else min(most_rows, len(stream))
    mine = np.arange(rank, -(-count // world_size) * world_size, world_size)
    for rows in np.split(mine, range(batch_size, len(mine), batch_size)):
        made = [stream.row(int(row) if row < count else len(stream) + 1) for row in rows]
        yield _batch(made, rows)
