"""Text → documents: text sources and how they are split into documents.

A source is read in two steps. `Source.blocks` runs in one process and only splits raw bytes into blocks of about
a megabyte; `documents` runs in the workers and parses a block into documents. Block boundaries depend only on the
source, so the output does not depend on the number of workers.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from glob import glob, has_magic
from itertools import groupby
from pathlib import Path
from typing import Any

from calm.data import readers
from calm.data.readers import COMPRESSIONS, MAX_DOCUMENT_BYTES, Block, DamagedSource, too_large
from calm.errors import DataError

BLOCK_READERS = {
    ".txt": readers.text_blocks,
    ".jsonl": readers.line_blocks,
    ".json": readers.json_blocks,
    ".parquet": readers.parquet_blocks,
}
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Source:
    """One file, the embedded corpus, or one streamed dataset."""

    name: str
    size: int | None  # bytes on disk; None if unknown
    modified: int | None  # modification time; detects changed sources on --resume
    blocks: Callable[[], Iterator[Block]]


@dataclass(frozen=True)
class BadDocument:
    """A document that could not be decoded, with the reason."""

    reason: str


def open_sources(
    names: list[str],
    text_field: str = "text",
    document_size: int = 32_768,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> list[Source]:
    """Open sources by name: `embedded`, `hf:NAME[:config][:split]`, a file or a glob."""
    sources: list[Source] = []
    options = {"text_field": text_field, "max_document_bytes": max_document_bytes}
    for name in names:
        if name == "embedded":
            sources.append(Source(name, None, None, lambda: readers.value_blocks("embedded", _chapters())))
        elif name.startswith("hf:"):
            sources.append(Source(name, None, None, lambda name=name: readers.hub_blocks(name, **options)))
        else:
            sources += [_file_source(path, {**options, "document_size": document_size}) for path in _paths(name)]
    if not sources:
        raise DataError("no sources; pass files, globs, hf:NAME, or the word embedded")
    return sources


def part_of(sources: list[Source], shard: str) -> dict[str, Any]:
    """Part I of N of a corpus, for a `shard` of the form I/N: its number, and where it begins and ends.

    Parts are consecutive and have about the same number of bytes on disk. A position is the number of a source,
    from 0, and of a document in it, from 1.
    """
    number, _, of = shard.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise DataError(f"--shard must have the form I/N with I from 1 to N, for example 2/8, not {shard!r}")
    for source in sources:
        if source.size is None:
            raise DataError(
                f"{source.name} has no size on disk to divide into parts; prepare it without --shard, or download it "
                "and pass its files"
            )
    begin, end = (_boundary(sources, part, int(of)) for part in (int(number) - 1, int(number)))
    return {"number": int(number), "of": int(of), "begin": begin, "end": end}


def _boundary(sources: list[Source], part: int, parts: int) -> list[int]:
    """Position where the first `part` of `parts` parts end: the first block that starts there or later."""
    sizes = [source.size or 0 for source in sources]
    target = sum(sizes) * part // parts
    for number, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        if target == 0 and part < parts:
            return [number, 1]
        if target < size:
            position = 0
            with suppress(DamagedSource):  # belongs to the part before the boundary
                for block in source.blocks():
                    if position >= target:
                        return [number, block.first]
                    position = block.bytes_read
            return [number + 1, 1]
        target -= size
    return [len(sources), 1]


def _paths(name: str) -> list[Path]:
    if not has_magic(name) or Path(name).exists():
        return [Path(name)]
    paths = sorted(Path(path) for path in glob(name, recursive=True))
    if not paths:
        raise DataError(f"no file matches {name!r}")
    return paths


def _file_source(path: Path, options: dict[str, Any]) -> Source:
    if not path.exists():
        raise DataError(f"no such file: {path}")
    if path.is_dir():
        raise DataError(f"{path} is a directory; pass the files in it, for example '{path}/*.jsonl'")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} is not readable by this user; check its permissions")
    file_format = path.with_suffix("").suffix if path.suffix in COMPRESSIONS else path.suffix
    if file_format not in BLOCK_READERS:
        known = ", ".join(BLOCK_READERS)
        raise DataError(
            f"unknown file format: {path}; the file name must end in {known}, optionally followed by .gz or .zst"
        )
    status = path.stat()
    return Source(
        str(path),
        status.st_size,
        status.st_mtime_ns,
        lambda: BLOCK_READERS[file_format](path, **options),
    )


def _chapters() -> Iterator[tuple[str, int]]:
    """The King James Bible: one document per chapter, one line per verse."""
    from pybible import Bible

    for _, verses in groupby(Bible, key=lambda verse: verse[:6]):  # "01:001:001 In the beginning…"
        chapter = "\n".join(verse[11:] for verse in verses)
        yield chapter, len(chapter)


def documents(
    block: Block, text_field: str = "text", max_document_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[str | BadDocument]:
    """Yield the documents of a block in order, without empty ones."""
    offset = block.offset
    for number, value in enumerate(block.values, block.first):
        try:
            if isinstance(value, bytes) and len(value) > max_document_bytes:
                raise ValueError(too_large(max_document_bytes))
            if text := _text_of(value, block, offset, text_field):
                if len(text) > max_document_bytes // 4 and len(text.encode()) > max_document_bytes:
                    raise ValueError(too_large(max_document_bytes))
                yield text
        except (ValueError, RecursionError) as error:
            unit = "line" if block.format == "line" else "document"
            yield BadDocument(f"{block.source}, {unit} {number}: {error}")
        if block.format != "value":
            offset += len(value) + (block.format == "line")


def _text_of(value: Any, block: Block, offset: int, text_field: str) -> str:
    """Decode the text of one raw document. Raises ValueError with the reason if it is invalid."""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            suffix = " of the decompressed file" if block.source.endswith(COMPRESSIONS) else ""
            raise ValueError(f"not valid UTF-8 at byte {offset + error.start}{suffix}") from None
        if block.format == "text" and "\0" in value:
            raise ValueError(f"null byte at byte {offset + value.encode().index(0)}: binary data, not text")
        if block.format == "text" or not value.strip():
            return value.strip() and value
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"invalid JSON ({error})") from None
    if isinstance(value, dict):
        if text_field not in value:
            fields = ", ".join(map(repr, list(value)[:8])) or "none"
            raise ValueError(f"no field {text_field!r} (fields: {fields}); choose another with --text-field")
        value = value[text_field]
    if not isinstance(value, str):
        raise ValueError(f"the text must be a string, not {value!r:.40}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"lone surrogate at character {error.start}: not valid Unicode text") from None
    return value


def split_of(text: str, validation_share: float, test_share: float) -> str:
    """Assign a document to a split by a hash of its text, independent of the order of documents.

    Identical documents are always in the same split.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    fraction = int.from_bytes(digest, "big") / 2**64
    if fraction < validation_share:
        return "validation"
    return "test" if fraction < validation_share + test_share else "train"
