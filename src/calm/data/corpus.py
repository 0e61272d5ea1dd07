"""Text → documents: where text comes from, and what is a document in it.

A source is read in two halves. `Source.blocks` runs in one process and only cuts raw bytes into blocks of about
a megabyte; `documents` runs in the workers and turns a block into documents. Block borders depend on the source
alone, so what comes out does not depend on the number of workers.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from glob import glob, has_magic
from itertools import groupby
from pathlib import Path
from typing import Any

from calm.data import readers
from calm.data.readers import COMPRESSIONS, Block
from calm.errors import DataError

FORMS = {
    ".txt": readers.text_blocks,
    ".jsonl": readers.line_blocks,
    ".json": readers.json_blocks,
    ".parquet": readers.parquet_blocks,
}
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Source:
    """One file, the embedded corpus, or one streamed data set."""

    name: str
    size: int | None  # bytes on disk, None where it cannot be known
    modified: int | None  # to notice, when a preparation is resumed, that the source is another one
    blocks: Callable[[], Iterator[Block]]


@dataclass(frozen=True)
class BadDocument:
    """A document that could not be read, and why."""

    reason: str


def open_sources(names: list[str], text_field: str = "text", document_size: int = 32_768) -> list[Source]:
    """Sources by name: `embedded`, `hf:NAME[:config][:split]`, a file or a glob."""
    sources: list[Source] = []
    for name in names:
        if name == "embedded":
            sources.append(Source(name, None, None, lambda: readers.value_blocks("embedded", _chapters())))
        elif name.startswith("hf:"):
            sources.append(Source(name, None, None, lambda name=name: readers.hub_blocks(name, text_field)))
        else:
            sources += [_file_source(path, text_field, document_size) for path in _paths(name)]
    if not sources:
        raise DataError("no source was given; name files, globs, hf:NAME or the word embedded")
    return sources


def _paths(name: str) -> list[Path]:
    if not has_magic(name) or Path(name).exists():
        return [Path(name)]
    found = sorted(Path(path) for path in glob(name, recursive=True))
    if not found:
        raise DataError(f"no file matches {name!r}")
    return found


def _file_source(path: Path, text_field: str, document_size: int) -> Source:
    if not path.exists():
        raise DataError(f"no such file: {path}")
    if path.is_dir():
        raise DataError(f"{path} is a directory; name the files in it, as in '{path}/*.jsonl'")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} may not be read by this user")
    form = path.with_suffix("").suffix if path.suffix in COMPRESSIONS else path.suffix
    if form not in FORMS:
        known = ", ".join(FORMS)
        raise DataError(
            f"cannot tell what {path} holds: its name should end in {known}, or one of them and .gz or .zst"
        )
    status = path.stat()
    return Source(
        str(path),
        status.st_size,
        status.st_mtime_ns,
        lambda: FORMS[form](path, text_field=text_field, document_size=document_size),
    )


def _chapters() -> Iterator[str]:
    """The King James text, a chapter a document, a verse a line."""
    from pybible import Bible

    for _, verses in groupby(Bible, key=lambda verse: verse[:6]):  # "01:001:001 In the beginning…"
        yield "\n".join(verse[11:] for verse in verses)


def documents(block: Block, text_field: str = "text") -> Iterator[str | BadDocument]:
    """The documents of a block, in order; empty ones are left out."""
    offset = block.offset
    for number, value in enumerate(block.values, block.first):
        try:
            if text := _text_of(value, block, offset, text_field):
                yield text
        except (ValueError, RecursionError) as error:
            where = "line" if block.form == "line" else "document"
            yield BadDocument(f"{block.source}, {where} {number}: {error}")
        if block.form != "value":
            offset += len(value) + (block.form == "line")


def _text_of(value: Any, block: Block, offset: int, text_field: str) -> str:
    """The text of one raw document; a ValueError says what is wrong with it."""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            unpacked = " of the unpacked file" if block.source.endswith(COMPRESSIONS) else ""
            raise ValueError(f"not valid UTF-8 at byte {offset + error.start}{unpacked}") from None
        if block.form == "text" and "\0" in value:
            raise ValueError(f"a zero byte at byte {offset + value.encode().index(0)}: binary data, not text")
        if block.form == "text" or not value.strip():
            return value.strip() and value
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error})") from None
    if isinstance(value, dict):
        if text_field not in value:
            fields = ", ".join(map(repr, list(value)[:8])) or "none"
            raise ValueError(f"no field {text_field!r} (its fields: {fields}); --text-field names another one")
        value = value[text_field]
    if not isinstance(value, str):
        raise ValueError(f"the text is not a string but {value!r:.40}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"a lone surrogate at character {error.start}, which no text can hold") from None
    return value


def split_of(text: str, validation_share: float, test_share: float) -> str:
    """The split of a document: a function of its text alone, so preparing again, or in another order, changes nothing.

    Equal documents always fall on the same side.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    point = int.from_bytes(digest, "big") / 2**64
    if point < validation_share:
        return "validation"
    return "test" if point < validation_share + test_share else "train"
