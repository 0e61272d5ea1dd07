"""Worker processes of a preparation: blocks → documents → tokens. They never import torch."""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np

from calm.data.chunks import close_document
from calm.data.corpus import BadDocument, documents, split_of
from calm.data.readers import MAX_DOCUMENT_BYTES, MIN_DOCUMENT_SIZE, Block
from calm.data.tokenizer import Tokenizer, load_tokenizer, single_threaded
from calm.errors import DataError


@dataclass(frozen=True)
class PrepareOptions:
    """Options that determine the content of a prepared directory, together with the sources."""

    tokenizer: str  # bpe:SIZE, a tokenizer directory or Hub name, or a tiktoken file
    text_field: str = "text"
    validation_share: float = 0.01
    test_share: float = 0.0
    document_size: int = 32_768  # bytes after which plain text is split into documents
    shard_tokens: int = 2**26
    max_document_bytes: int = MAX_DOCUMENT_BYTES  # larger documents are invalid

    def __post_init__(self) -> None:
        if not (self.validation_share >= 0 and self.test_share >= 0 and self.validation_share + self.test_share < 1):
            raise DataError(
                "the validation and test shares must not be negative and must sum to less than 1, but they are "
                f"{self.validation_share} and {self.test_share}"
            )
        for name, minimum in (("document_size", MIN_DOCUMENT_SIZE), ("shard_tokens", 1), ("max_document_bytes", 1)):
            if getattr(self, name) < minimum:
                raise DataError(f"{name} must be at least {minimum}, not {getattr(self, name)}")


@dataclass
class Encoded:
    """A tokenized block."""

    splits: dict[str, tuple[np.ndarray, np.ndarray, int]]  # token ids, document lengths, bytes of text
    bad: list[str]  # why documents could not be decoded


_worker: tuple[Tokenizer, PrepareOptions]


def _start_worker(directory: str, options: PrepareOptions) -> None:
    global _worker
    _worker = load_tokenizer(directory), options


def _start_process(directory: str, options: PrepareOptions) -> None:
    """Initialize a worker process: it ignores Ctrl-C, which the parent handles, and exits with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _start_worker(directory, options)


def encode(block: Block | BadDocument) -> Encoded:
    """Parse and tokenize a block."""
    tokenizer, options = _worker
    if isinstance(block, BadDocument):
        return Encoded({}, [block.reason])
    texts: dict[str, list[str]] = {}
    bad: list[str] = []
    for text in documents(block, options.text_field, options.max_document_bytes):
        if isinstance(text, BadDocument):
            bad.append(text.reason)
        else:
            texts.setdefault(split_of(text, options.validation_share, options.test_share), []).append(text)
    splits = {}
    for split, members in texts.items():
        ids = [close_document(ids, tokenizer.eos_token_id) for ids in tokenizer.encode_documents(members)]
        lengths = np.array([len(document) for document in ids], dtype=np.uint32)
        tokens = np.concatenate([np.array(document, dtype=tokenizer.dtype) for document in ids])
        splits[split] = tokens, lengths, sum(len(text.encode("utf-8")) for text in members)
    return Encoded(splits, bad)


def map_in_order(function, items, workers: int, arguments: tuple) -> Iterator[tuple[Any, Encoded]]:
    """Map `function` over blocks in worker processes, in order and with a bounded queue."""
    if workers == 1:
        _start_worker(*arguments)
        with single_threaded():
            for item in items:
                yield item, function(item[2])
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_process, arguments)
    try:
        pending: deque = deque()
        for item in items:
            pending.append((item, pool.submit(function, item[2])))
            if len(pending) > 2 * workers:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, perhaps because memory ran out; run again with --resume and fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
