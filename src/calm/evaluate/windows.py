"""Documents → windows that fit a model, each start of a score in exactly one of them.

A window holds `length` tokens to read from and the LONGEST tokens behind them. Scores of a model start at K, 2K, …,
`length`; the next window begins at `length` and has nothing but its own beginning as context.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calm.data.shards import TokenStream
from calm.scores.brier import LONGEST


class Document(NamedTuple):
    number: int
    tokens: np.ndarray


@dataclass(frozen=True)
class Window:
    number: int  # it seeds the noise
    document: int
    tokens: np.ndarray  # at most length + LONGEST


def documents_of(stream: TokenStream) -> Iterator[Document]:
    for number in range(len(stream.document_lengths)):
        first, last = stream.document_range(number)
        yield Document(number, np.asarray(stream[first:last], dtype=np.int64))


def windows_of(documents: Iterable[Document], length: int, least: int) -> Iterator[Window]:
    """Those with at least so many tokens; shorter rests have nothing to score."""
    number = 0
    for document in documents:
        for begin in range(0, max(len(document.tokens) - least + 1, 0), length):
            yield Window(number, document.number, document.tokens[begin : begin + length + LONGEST])
            number += 1
