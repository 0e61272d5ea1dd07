"""Packing documents into rows of chunks.

A split is one long stream of token ids in which every document ends with the end-of-text token. A row of a batch is a
slice of this stream:

    T = (L + 1)·K ids = L + 1 chunks of K; the first L chunks are inputs, the last L are targets.

Rows start L·K ids apart, so each chunk except the first of the stream is predicted once per epoch.

Packed (default): documents are concatenated, and chunks may cross document boundaries. No position is wasted, and the
model sees text at every offset, as it does when it continues a prompt of arbitrary length.
Aligned: each document is padded to a multiple of K, so that it starts at a chunk boundary.

Front padding: a row may start with 0 to K-1 padding tokens. At inference, a prompt whose length is not a multiple of K
is padded in the same way. The shift also exposes the model to every alignment of text and chunks during training.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from calm.data.shards import TokenStream
from calm.errors import DataError


def close_document(ids: list[int], eos_token_id: int) -> list[int]:
    """Append the end-of-text token to a document."""
    return [*ids, eos_token_id]


class Row(NamedTuple):
    tokens: np.ndarray  # (T,) int64
    mask: np.ndarray  # (T,) bool: True for document tokens, False for padding


@dataclass(frozen=True)
class ChunkedStream:
    """A token stream divided into rows of chunks."""

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
                f"sequence_length must be a positive multiple of chunk_size, but {self.sequence_length} is not a "
                f"multiple of {self.chunk_size}; use {_nearest_multiple(self.sequence_length, self.chunk_size)}"
            )

    @property
    def row_length(self) -> int:
        return self.sequence_length + self.chunk_size  # T

    @cached_property
    def _padded_ends(self) -> np.ndarray:
        """End offset of each document when all documents are padded to a multiple of the chunk size."""
        return np.cumsum(-(-self.stream.document_lengths // self.chunk_size) * self.chunk_size)

    def __len__(self) -> int:
        """Number of rows. The last row may be padded; a stream of one chunk or less still makes one row."""
        length = len(self.stream)
        if self.align_documents and length:
            length = int(self._padded_ends[-1])
        return max(-(-(length - self.chunk_size) // self.sequence_length), min(length, 1))

    def row(self, index: int, front_padding: int = 0) -> Row:
        """Return row `index`, starting with `front_padding` padding tokens."""
        start = index * self.sequence_length
        if not self.align_documents:
            return self._assemble([self.stream[start : start + self.row_length - front_padding]], front_padding)
        segments, position = [], front_padding
        document = int(np.searchsorted(self._padded_ends, start, side="right"))
        while position < self.row_length and document < len(self._padded_ends):
            first, last = self.stream.document_range(document)
            padded_start = int(self._padded_ends[document - 1]) if document else 0
            segments.append(self.stream[first + max(0, start - padded_start) : last])
            position = _round_up(position + len(segments[-1]), self.chunk_size)
            document += 1
        return self._assemble(segments, front_padding)

    def _assemble(self, segments: list[np.ndarray], front_padding: int) -> Row:
        """Concatenate segments, each starting at a chunk boundary; the first follows the front padding."""
        tokens = np.full(self.row_length, self.pad_token_id, dtype=np.int64)
        mask = np.zeros(self.row_length, dtype=bool)
        position = front_padding
        for segment in segments:
            end = min(position + len(segment), self.row_length)
            tokens[position:end] = segment[: end - position]
            mask[position:end] = True
            position = _round_up(end, self.chunk_size)
        return Row(tokens, mask)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _nearest_multiple(length: int, multiple: int) -> int:
    return max(1, round(length / multiple)) * multiple
