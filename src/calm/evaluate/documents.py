"""The text that a model is scored on: documents as token ids, cut into windows that fit the model."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calm.data.chunks import close_document
from calm.data.corpus import BadDocument, documents, open_sources
from calm.data.shards import PreparedData, TokenStream
from calm.data.tokenizer import Tokenizer
from calm.errors import DataError
from calm.scores.brier import MAX_NGRAM


class Document(NamedTuple):
    number: int
    tokens: np.ndarray


@dataclass(frozen=True)
class Window:
    """`length` tokens to read, and the MAX_NGRAM tokens after them.

    Scores start at K, 2K, …, `length`, so each start is in exactly one window. The next window begins at `length` and
    has no other context.
    """

    number: int  # seeds the noise
    document: int
    tokens: np.ndarray  # at most length + MAX_NGRAM


def documents_of(stream: TokenStream) -> Iterator[Document]:
    for number in range(len(stream.document_lengths)):
        first, last = stream.document_range(number)
        yield Document(number, np.asarray(stream[first:last], dtype=np.int64))


def windows_of(documents: Iterable[Document], length: int, min_tokens: int) -> Iterator[Window]:
    """Windows with at least `min_tokens` tokens; shorter ones have nothing to score."""
    number = 0
    for document in documents:
        for begin in range(0, max(len(document.tokens) - min_tokens + 1, 0), length):
            yield Window(number, document.number, document.tokens[begin : begin + length + MAX_NGRAM])
            number += 1


class EvaluationText:
    """Documents as token ids: a split of prepared data, or a file that is tokenized as it is read."""

    def __init__(self, data: Path, split: str, tokenizer: Tokenizer):
        self.data, self.split, self.tokenizer = data, split, tokenizer
        self.prepared = PreparedData(data) if data.is_dir() else None
        if self.prepared is not None and self.prepared.tokenizer.sha256 != tokenizer.sha256:
            raise DataError(f"{data} was prepared with another tokenizer than the model's")
        self.tokens: int | None = None  # known beforehand, or once all of a file was read
        self.bytes = 0
        if self.prepared is not None:
            self.tokens = len(self.prepared.split(split))
            self.bytes = self.prepared.manifest["splits"][split]["bytes"]

    def documents(self) -> Iterator[Document]:
        """All documents, in order."""
        if self.prepared is not None:
            yield from documents_of(self.prepared.split(self.split))
            return
        number = self.bytes = tokens = 0
        for source in open_sources([str(self.data)]):
            for block in source.blocks():
                for text in documents(block):
                    if isinstance(text, BadDocument):
                        raise DataError(str(text))
                    ids = close_document(self.tokenizer.encode(text), self.tokenizer.eos_token_id)
                    self.bytes += len(text.encode())
                    tokens += len(ids)
                    yield Document(number, np.array(ids, dtype=np.int64))
                    number += 1
        self.tokens = tokens
