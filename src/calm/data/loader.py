"""Shards → batches.

The batch of step s is a pure function of (seed, s): the only state of a loader is the step, and the global batch does
not depend on the number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calm.data.chunks import ChunkedStream, Row
from calm.errors import DataError
from calm.seeds import SeedStream, hash64, permute

PERIOD = 1000  # rows over which the weights of a mixture are exact


class Batch(NamedTuple):
    tokens: np.ndarray  # (B, T) int64
    mask: np.ndarray  # (B, T) bool: False for padding
    rows: np.ndarray  # (B,) int64: row number since the start of training; seeds the row's random numbers


@dataclass(frozen=True)
class Loader:
    """Training batches from one dataset or a weighted mixture of datasets."""

    streams: list[ChunkedStream]
    weights: list[float]
    batch_size: int  # rows of the global batch
    seed: int = 0
    front_padding: float = 1.0  # fraction of rows that start with 0 to K-1 padding tokens
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if len({(s.chunk_size, s.sequence_length) for s in self.streams}) != 1:
            raise DataError("all datasets of a mixture must have the same chunk_size and sequence_length")
        if any(len(stream) == 0 for stream in self.streams):
            raise DataError(
                "a dataset of the mixture has no tokens in this split; remove it, or prepare it with a larger share"
            )
        if len(self.weights) != len(self.streams) or min(self._quotas()) < 1:
            raise DataError(
                f"each dataset needs a weight of at least 1/{PERIOD} of the total weight, not {self.weights}"
            )
        if self.batch_size < 1 or self.batch_size % self.world_size:
            raise DataError(
                f"batch_size must be a positive multiple of the number of processes, "
                f"but {self.batch_size} is none of {self.world_size}"
            )

    def _quotas(self) -> np.ndarray:
        """Number of rows of each dataset per PERIOD rows, rounded by the largest-remainder method."""
        exact = np.asarray(self.weights, dtype=float) / np.sum(self.weights) * PERIOD
        quotas = np.floor(exact).astype(np.int64)
        remaining = PERIOD - quotas.sum()
        quotas[np.argsort(quotas - exact, kind="stable")[:remaining]] += 1
        return quotas

    def batch(self, step: int) -> Batch:
        """Return this rank's part of the global batch."""
        return self.batch_and_whole(step, whole=False)[0]

    def batch_and_whole(self, step: int, whole: bool = True) -> tuple[Batch, Batch]:
        """Return this rank's part and the global batch. With `whole=False`, both are this rank's part."""
        local_size = self.batch_size // self.world_size
        local = slice(self.rank * local_size, (self.rank + 1) * local_size)
        rows = step * self.batch_size + np.arange(self.batch_size)
        if not whole:
            rows, local = rows[local], slice(None)
        datasets, positions = self._positions(rows)
        indices = self._indices(datasets, positions)
        padding = self._front_padding(rows)
        loaded = [self.streams[d].row(int(i), int(p)) for d, i, p in zip(datasets, indices, padding, strict=True)]
        batch = _collate(loaded, rows)
        return Batch(*(array[local] for array in batch)), batch

    def _positions(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Dataset of each row, and how many earlier rows came from the same dataset."""
        if len(self.streams) == 1:
            return np.zeros_like(rows), rows
        quotas = self._quotas()
        ends = np.cumsum(quotas)
        slots = permute(rows % PERIOD, PERIOD, self.seed, SeedStream.MIXTURE, rows // PERIOD)
        datasets = np.searchsorted(ends, slots, side="right")
        return datasets, rows // PERIOD * quotas[datasets] + slots - (ends - quotas)[datasets]

    def _front_padding(self, rows: np.ndarray) -> np.ndarray:
        """Number of padding tokens at the start of each row."""
        padded = hash64(self.seed, SeedStream.FRONT_PADDING, rows) / 2.0**64 < self.front_padding
        lengths = hash64(self.seed, SeedStream.FRONT_PADDING_LENGTH, rows) % np.uint64(self.streams[0].chunk_size)
        return np.where(padded, lengths, 0)

    def _indices(self, datasets: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Row index within its dataset for each position; every epoch is shuffled differently."""
        indices = np.empty_like(positions)
        for dataset, stream in enumerate(self.streams):
            selected = datasets == dataset
            epochs, offsets = np.divmod(positions[selected], len(stream))
            indices[selected] = permute(offsets, len(stream), self.seed, SeedStream.ORDER, dataset, epochs)
        return indices


def _collate(loaded: list[Row], rows: np.ndarray) -> Batch:
    return Batch(np.stack([row.tokens for row in loaded]), np.stack([row.mask for row in loaded]), rows)


def evaluation_batches(
    stream: ChunkedStream, batch_size: int, rank: int = 0, world_size: int = 1, max_rows: int | None = None
) -> Iterator[Batch]:
    """Yield the first `max_rows` rows of a split (default: all), in order and without front padding.

    Rows are distributed round-robin over the ranks.
    """
    if len(stream) == 0:
        raise DataError("this split has no tokens; prepare the data again with a larger share for it")
    # Collectives need the same number of rows on every rank: rows past the end contain only padding.
    count = len(stream) if max_rows is None else min(max_rows, len(stream))
    local = np.arange(rank, -(-count // world_size) * world_size, world_size)
    for rows in np.split(local, range(batch_size, len(local), batch_size)):
        yield _collate([stream.row(int(row) if row < count else len(stream) + 1) for row in rows], rows)
