"""How documents meet chunks: the only place that knows.

A split is one long stream of token ids, every document closed by its end id. A row of a batch is a stretch of it:

    T = (L + 1)·K ids = L + 1 chunks of K; the model reads the first L and predicts the last L.

Rows begin L·K ids apart, so each chunk but the first of the stream is predicted once an epoch.

Packed (the default): chunk borders fall where they fall, also across documents. No position is wasted and a model sees
text at every offset, as it must when it continues a prompt of any length.
Aligned: each document is padded with fill ids to a whole number of chunks, so that it begins at a border.

Front fill: a row may begin with 0 to K-1 fill ids. A prompt whose length is no multiple of K is put on a chunk border
in this way, and the shift lets every alignment of text and chunks occur in training.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from calm.data.shards import TokenStream
from calm.errors import DataError


def close_document(ids: list[int], eos_token_id: int) -> list[int]:
    """Every document ends with its end id."""
    return [*ids, eos_token_id]


class Row(NamedTuple):
    tokens: np.ndarray  # (T,) int64
    mask: np.ndarray  # (T,) bool: true for the tokens of documents, false for fill


@dataclass(frozen=True)
class ChunkedStream:
    """Rows of a token stream."""

    stream: TokenStream
    chunk_size: int  # K
    sequence_length: int  # L·K
    pad_token_id: int
    align_documents: bool = False

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise DataError(f"chunk_size must be at least 1, not {self.chunk_size}")
        if self.sequence_length < 1 or self.sequence_length % self.chunk_size:
            raise DataError(
                f"sequence_length must be a positive multiple of chunk_size, but {self.sequence_length} is no "
                f"multiple of {self.chunk_size}; {_nearest_multiple(self.sequence_length, self.chunk_size)} would be"
            )

    @property
    def row_length(self) -> int:
        return self.sequence_length + self.chunk_size  # T

    @cached_property
    def _padded_ends(self) -> np.ndarray:
        """Where each document ends when all are padded to whole chunks."""
        return np.cumsum(-(-self.stream.document_lengths // self.chunk_size) * self.chunk_size)

    def __len__(self) -> int:
        """Number of rows; the last may be partly filled, and a stream of a chunk or less still is one."""
        length = len(self.stream)
        if self.align_documents and length:
            length = int(self._padded_ends[-1])
        return max(-(-(length - self.chunk_size) // self.sequence_length), min(length, 1))

    def row(self, index: int, front_fill: int = 0) -> Row:
        start = index * self.sequence_length
        if not self.align_documents:
            return self._lay([self.stream[start : start + self.row_length - front_fill]], front_fill)
        pieces, position = [], front_fill
        document = int(np.searchsorted(self._padded_ends, start, side="right"))
        while position < self.row_length and document < len(self._padded_ends):
            first, last = self.stream.document_range(document)
            padded_start = int(self._padded_ends[document - 1]) if document else 0
            pieces.append(self.stream[first + max(0, start - padded_start) : last])
            position = _round_up(position + len(pieces[-1]), self.chunk_size)
            document += 1
        return self._lay(pieces, front_fill)

    def _lay(self, pieces: list[np.ndarray], front_fill: int) -> Row:
        """Put pieces one after another, each beginning at a chunk border; the first after its fill."""
        tokens = np.full(self.row_length, self.pad_token_id, dtype=np.int64)
        mask = np.zeros(self.row_length, dtype=bool)
        position = front_fill
        for piece in pieces:
            end = min(position + len(piece), self.row_length)
            tokens[position:end] = piece[: end - position]
            mask[position:end] = True
            position = _round_up(end, self.chunk_size)
        return Row(tokens, mask)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _nearest_multiple(length: int, multiple: int) -> int:
    return max(1, round(length / multiple)) * multiple
