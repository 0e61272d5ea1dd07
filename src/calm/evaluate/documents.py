"""The text that a model is scored on: documents as token ids, cut into windows that fit the model."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calm.data.chunks import close_document
from calm.data.corpus import BadDocument, documents, open_sources
from calm.data.shards import PreparedData
from calm.data.tokenizer import Tokenizer
from calm.errors import DataError
from calm.scores.brier import MAX_NGRAM


class Document(NamedTuple):
    number: int
    tokens: np.ndarray


@dataclass(frozen=True)
class Window:
    """`length` tokens to read, and the MAX_NGRAM tokens after them.

    Scores start at K, 2K, …, `length`, so each start is in exactly one window. The next window begins at `length`,
    without the tokens before it as context.
    """

    number: int  # seeds the noise
    document: int
    tokens: np.ndarray  # at most length + MAX_NGRAM


def windows_of(
    documents: Iterable[Document], length: int, shifts: range = range(1), pad_token_id: int = 0
) -> Iterator[Window]:
    """The windows of every document, once for each number of padding tokens at its front.

    Windows have at least two tokens, the minimum for a likelihood.
    """
    for document in documents:
        for shift in shifts:
            tokens = np.concatenate([np.full(shift, pad_token_id), document.tokens])
            for index, begin in enumerate(range(0, len(tokens) - 1, length)):
                number = (document.number << 32) + index * len(shifts) + shift
                yield Window(number, document.number, tokens[begin : begin + length + MAX_NGRAM])


class EvaluationText:
    """Documents as token ids: a split of prepared data, or a file that is tokenized as it is read."""

    def __init__(self, data: Path, split: str, tokenizer: Tokenizer):
        self.data, self.split, self.tokenizer = data, split, tokenizer
        self.prepared = PreparedData(data) if data.is_dir() else None
        if self.prepared is not None and self.prepared.tokenizer.sha256 != tokenizer.sha256:
            raise DataError(f"{data} was prepared with another tokenizer than the model's")
        self.tokens: int | None = None  # known in advance, or once a file was read to its end
        self.bytes = 0
        if self.prepared is not None:
            self.tokens = len(self.prepared.split(split))
            self.bytes = self.prepared.manifest["splits"][split]["bytes"]

    def documents(self) -> Iterator[Document]:
        """All documents, in order."""
        if self.prepared is not None:
            stream = self.prepared.split(self.split)
            for number in range(len(stream.document_lengths)):
                first, last = stream.document_range(number)
                yield Document(number, np.asarray(stream[first:last], dtype=np.int64))
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
