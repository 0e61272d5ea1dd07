"""The text that a model is scored on: documents as token ids."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from calm.data.chunks import close_document
from calm.data.corpus import BadDocument, documents, open_sources
from calm.data.shards import PreparedData
from calm.data.tokenizer import Tokenizer
from calm.errors import DataError
from calm.evaluate.windows import Document, documents_of


class Text:
    """Documents as token ids: a split of prepared data, or a file that is read and tokenized as it goes."""

    def __init__(self, data: Path, split: str, tokenizer: Tokenizer):
        self.data, self.split, self.tokenizer = data, split, tokenizer
        self.prepared = PreparedData(data) if data.is_dir() else None
        if self.prepared is not None and self.prepared.tokenizer.sha256 != tokenizer.sha256:
            raise DataError(f"{data} was prepared with another tokenizer than that of the model")
        self.tokens: int | None = None  # known beforehand, or once all of a file was read
        self.bytes = 0
        if self.prepared is not None:
            self.tokens = len(self.prepared.split(split))
            self.bytes = self.prepared.manifest["splits"][split]["bytes"]

    def documents(self) -> Iterator[Document]:
        """All of them, in the order in which they stand."""
        if self.prepared is not None:
            yield from documents_of(self.prepared.split(self.split))
            return
        number = self.bytes = 0
        counted = 0
        for source in open_sources([str(self.data)]):
            for block in source.blocks():
                for text in documents(block):
                    if isinstance(text, BadDocument):
                        raise DataError(str(text))
                    ids = close_document(self.tokenizer.encode(text), self.tokenizer.eos_token_id)
                    self.bytes += len(text.encode())
                    counted += len(ids)
                    yield Document(number, np.array(ids, dtype=np.int64))
                    number += 1
        self.tokens = counted
