"""Files → blocks: raw documents in blocks of about a megabyte, for all supported file formats and compressions."""

import codecs
import importlib
import json
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, cast

from calm.errors import DataError

BLOCK_SIZE = 2**20  # bytes: small enough for memory, large enough to amortize sending a block to a worker
MAX_DOCUMENT_BYTES = 2**24  # default of --max-document-bytes; tokenizing it takes up to 1.4 GB
MIN_DOCUMENT_SIZE = 4  # bytes of plain text: the longest UTF-8 character
MAX_ROW_GROUP = 2**28  # bytes of a row group that are read even if its texts are too large
COMPRESSIONS = (".gz", ".zst")
# Compressed bytes per call. gzip expands them to at most 4 MB, and Zstandard to 8 MB.
GZIP_INPUT, ZSTANDARD_INPUT = 2**12, 2**8


@dataclass(frozen=True)
class Block:
    """Consecutive raw documents of one source."""

    source: str
    format: Literal["text", "line", "value"]
    values: list[Any]  # text and line: bytes; value: a parsed JSON value or table cell
    first: int  # 1-based number of the first value
    offset: int = 0  # offset of the first value in the decompressed file
    bytes_read: int = 0  # position in the file on disk, for the progress bar


class DamagedSource(DataError):
    """A file that cannot be read to the end. The blocks before the damage are valid."""


class Decompressed:
    """Iterates over the content of a file, decompressed and without a byte-order mark.

    A damaged file ends the iteration early and sets `damage`.
    """

    def __init__(self, path: Path):
        self.path = path
        self.position = 0  # in the file on disk
        self.damage: DamagedSource | None = None

    def __iter__(self) -> Iterator[bytes]:
        total = 0
        with self.path.open("rb") as file:
            try:
                for data in _decompress(file, self.path.suffix):
                    self.position = file.tell()
                    yield data.removeprefix(codecs.BOM_UTF8) if total == 0 else data
                    total += len(data)
            except (EOFError, OSError) as error:
                if total == 0:
                    raise DataError(f"{self.path} is damaged or not a {self.path.suffix} file ({error})") from error
                self.damage = DamagedSource(
                    f"{self.path} is truncated or damaged after {total:,} decompressed bytes ({error}); download it "
                    "again, or keep the readable part with --on-bad-document skip"
                )


def _decompress(file: IO[bytes], suffix: str) -> Iterator[bytes]:
    if suffix == ".gz":
        return _pieces(_members(file, GZIP_INPUT, lambda: zlib.decompressobj(31), zlib.error))
    if suffix == ".zst":
        zstandard = optional("zstandard")
        decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
        return _pieces(_members(file, ZSTANDARD_INPUT, decompressor.decompressobj, zstandard.ZstdError))
    return iter(lambda: file.read(BLOCK_SIZE), b"")


def _pieces(outputs: Iterator[bytes]) -> Iterator[bytes]:
    """Join and split the outputs of a decompressor into pieces of BLOCK_SIZE."""
    buffer = bytearray()
    try:
        for output in outputs:
            buffer += output
            while len(buffer) >= BLOCK_SIZE:
                yield bytes(buffer[:BLOCK_SIZE])
                del buffer[:BLOCK_SIZE]
    except (EOFError, OSError):
        if buffer:
            yield bytes(buffer)
        raise
    if buffer:
        yield bytes(buffer)


def _members(file: IO[bytes], size: int, decompressor: Callable[[], Any], failure: type[Exception]) -> Iterator[bytes]:
    """Decompress a file of concatenated members (gzip) or frames (zstd). The last one must be complete."""
    member = None
    while compressed := file.read(size):
        while compressed := compressed.lstrip(b"\0") if member is None else compressed:  # zero padding between members
            member = member or decompressor()
            try:
                if data := member.decompress(compressed):
                    yield data
            except failure as error:
                raise EOFError(str(error)) from error
            compressed, member = member.unused_data, None if member.eof else member
    if member is not None:
        raise EOFError("unexpected end of file")


def optional(module: str) -> Any:
    """Import a module of the `data` extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"this source needs {module.partition('.')[0]}; install it with: pip install 'calm-lm[data]'"
        ) from error


def line_blocks(path: Path, max_document_bytes: int, **_: Any) -> Iterator[Block]:
    """JSON Lines: complete lines, which the workers parse. Of one that is too long, only the first bytes are kept."""
    number, offset, rest, too_long = 1, 0, b"", False
    content = Decompressed(path)
    for data in content:
        if too_long:
            end = data.find(b"\n")
            offset, data, too_long = offset + (end + 1 or len(data)), data[end + 1 :] if end >= 0 else b"", end < 0
        searched = len(rest) if len(rest) >= BLOCK_SIZE else 0
        rest += data
        end = rest.rfind(b"\n", searched) if len(rest) >= BLOCK_SIZE else -1
        if end >= 0:
            lines = rest[:end].split(b"\n")
            yield Block(str(path), "line", lines, number, offset, content.position)
            number, offset, rest = number + len(lines), offset + end + 1, rest[end + 1 :]
        elif len(rest) > max(max_document_bytes, BLOCK_SIZE):
            yield Block(str(path), "line", [rest[: max_document_bytes + 1]], number, offset, content.position)
            number, offset, rest, too_long = number + 1, offset + len(rest), b"", True
    if rest := _undamaged(rest, content):
        yield Block(str(path), "line", rest.split(b"\n"), number, offset, content.position)
    if content.damage:
        raise content.damage


def text_blocks(path: Path, document_size: int, **_: Any) -> Iterator[Block]:
    """Plain text: a long file is split into documents at the first paragraph break after `document_size` bytes."""
    documents: list[bytes] = []
    number, offset, size, rest = 1, 0, 0, b""
    content = Decompressed(path)
    for data in content:
        rest += data
        while len(rest) >= 2 * document_size:
            cut = _paragraph_end(rest, document_size)
            documents.append(rest[:cut])
            rest, size = rest[cut:], size + cut
            if size >= BLOCK_SIZE:
                yield Block(str(path), "text", documents, number, offset, content.position)
                number, offset, documents, size = number + len(documents), offset + size, [], 0
    if rest := _undamaged(rest, content):
        documents.append(rest)
    if documents:
        yield Block(str(path), "text", documents, number, offset, content.position)
    if content.damage:
        raise content.damage


def _undamaged(rest: bytes, content: Decompressed) -> bytes:
    """The last data of a file; if the file is damaged, only its complete lines."""
    return rest[: rest.rfind(b"\n") + 1] if content.damage else rest


def _paragraph_end(text: bytes, size: int) -> int:
    """Where to split: after the first blank line past `size`, else after a line, else between two characters."""
    for mark in (b"\n\n", b"\r\n\r\n", b"\n"):
        position = text.find(mark, size, 2 * size)
        if position >= 0:
            return position + len(mark)
    return next((cut for cut in range(size, size - 4, -1) if text[cut] & 0xC0 != 0x80), size)


def value_blocks(
    source: str, values: Iterable[tuple[Any, int]], bytes_read: Callable[[], int] = lambda: 0
) -> Iterator[Block]:
    """Group values of known sizes, one document each, into blocks."""
    batch: list[Any] = []
    number, size = 1, 0
    for value, own in values:
        batch.append(value)
        size += own
        if size >= BLOCK_SIZE:
            yield Block(source, "value", batch, number, bytes_read=bytes_read())
            number, batch, size = number + len(batch), [], 0
    if batch:
        yield Block(source, "value", batch, number, bytes_read=bytes_read())


def text_value(value: Any, max_document_bytes: int) -> tuple[Any, int]:
    """A value and its size. Of a text that is too long, only the beginning is kept."""
    return (value[: max_document_bytes + 1], len(value)) if isinstance(value, str) else (value, 8)


def json_blocks(path: Path, max_document_bytes: int, **_: Any) -> Iterator[Block]:
    """JSON: an array of documents, one document, or concatenated documents."""
    content, damage = Decompressed(path), None

    def values() -> Iterator[tuple[Any, int]]:
        nonlocal damage
        try:
            yield from _json_values(_decoded(content), max_document_bytes)
            damage = content.damage
        except ValueError as error:  # later documents cannot be located
            remedy = "; skip the rest of the file with --on-bad-document skip"
            damage = content.damage or DamagedSource(f"{path}: {error}{remedy}")

    yield from value_blocks(str(path), values(), lambda: content.position)
    if damage:
        raise damage


def _decoded(content: Iterable[bytes]) -> Iterator[str]:
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    for data in chain(content, [b""]):
        buffered = len(decoder.getstate()[0])  # bytes of a character that continues in this data
        try:
            yield decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise ValueError(f"not valid UTF-8 at byte {offset - buffered + error.start}") from None
        offset += len(data)


def _json_values(content: Iterator[str], max_document_bytes: int) -> Iterator[tuple[Any, int]]:
    """Parse a stream of JSON incrementally, one document at a time: each with its size."""
    decoder, separators = json.JSONDecoder(), re.compile(r"[\s,]*")
    text, at, number, in_array, more = "", 0, 1, False, True

    def read(at_least: int) -> None:
        nonlocal text, at, more
        text, at = text[at:], 0
        while more and len(text) < at_least:
            data = next(content, None)
            more, text = data is not None, text + (data or "")

    while True:
        at = cast(re.Match, separators.match(text, at)).end()
        remaining = len(text) - at
        if remaining == 0 and more:
            read(1)
        elif remaining == 0:
            if in_array:
                raise ValueError("the array is not closed")
            return
        elif text[at] == "[" and number == 1 and not in_array:
            in_array, at = True, at + 1
        elif text[at] == "]" and in_array:
            in_array, at = False, at + 1
        else:
            try:
                value, end = decoder.raw_decode(text, at)
            except (json.JSONDecodeError, RecursionError) as error:
                if more and remaining > max_document_bytes:
                    raise ValueError(f"document {number}: {too_large(max_document_bytes)}, or invalid JSON") from error
                if not more:
                    raise ValueError(f"document {number}: invalid JSON ({error})") from error
                read(2 * remaining)  # doubling bounds how often a large document is parsed again
                continue
            if end == len(text) and more:  # a number may continue in the next read
                read(remaining + 1)
                continue
            yield text_value(value, max_document_bytes)[0], end - at
            at, number = end, number + 1


def parquet_blocks(path: Path, text_field: str, max_document_bytes: int, **_: Any) -> Iterator[Block]:
    """Parquet: one column of a table. A compressed file is first decompressed to a temporary file, to be seekable.

    The column is read as a dictionary: a text that a small file repeats many times is in memory once.
    """
    parquet, arrow = optional("pyarrow.parquet"), optional("pyarrow")
    with tempfile.TemporaryFile() as decompressed:
        if path.suffix in COMPRESSIONS:
            content = Decompressed(path)
            decompressed.writelines(content)
            if content.damage:
                raise content.damage
        try:
            file = decompressed if path.suffix in COMPRESSIONS else path
            table = parquet.ParquetFile(file)
            check_column(text_field, table.schema_arrow.names, str(path))
            if text_field in (table.schema.column(i).path for i in range(len(table.schema))):  # not nested
                table = parquet.ParquetFile(file, read_dictionary=[text_field])
            size, rows, done, damage = path.stat().st_size, table.metadata.num_rows, 0, None

            def values() -> Iterator[tuple[Any, int]]:
                nonlocal done, damage
                for number in range(table.num_row_groups):
                    group = table.metadata.row_group(number)
                    if _column_size(group, text_field) > max(MAX_ROW_GROUP, max_document_bytes * group.num_rows):
                        remedy = "skip the rest of the file with --on-bad-document skip"
                        problem = f"{path}, row group {number + 1}: its texts are {too_large(max_document_bytes)}"
                        damage = DamagedSource(f"{problem}; {remedy}")
                        return
                    for batch in table.iter_batches(batch_size=256, row_groups=[number], columns=[text_field]):
                        done += batch.num_rows
                        for cell in batch.column(0):
                            yield _cell_value(cell, max_document_bytes)

            yield from value_blocks(str(path), values(), lambda: size * done // rows)
            if damage:
                raise damage
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{path} is damaged or not a Parquet file ({error})") from error


def _column_size(row_group: Any, text_field: str) -> int:
    """Decompressed bytes of a column, from the metadata."""
    columns = [row_group.column(i) for i in range(row_group.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == text_field)


def _cell_value(cell: Any, max_document_bytes: int) -> tuple[Any, int]:
    """The value of a table cell, and its size. Of a text that is too long, only the beginning is decoded."""
    text: Any = getattr(cell, "value", None)  # of a dictionary
    buffer = text.as_buffer() if hasattr(text, "as_buffer") else b""
    if buffer and len(buffer) > max_document_bytes:
        return str(buffer[: max_document_bytes + 4], "utf-8", "ignore"), max_document_bytes
    return text_value(cell.as_py(), max_document_bytes)


def hub_blocks(name: str, text_field: str, max_document_bytes: int) -> Iterator[Block]:
    """`hf:NAME[:config][:split]`: a Hugging Face dataset, streamed with `datasets`."""
    datasets = optional("datasets")
    path, config, split, *surplus = [*name.removeprefix("hf:").split(":"), "", ""]
    if any(surplus):
        raise DataError(f"{name!r} has too many parts; the format is hf:NAME[:config][:split]")

    def values() -> Iterator[tuple[Any, int]]:
        try:
            rows = datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
            for number, row in enumerate(rows):
                if number == 0:
                    check_column(text_field, list(row), name)
                yield text_value(row[text_field], max_document_bytes)
        except DataError:
            raise
        except Exception as error:  # datasets raises many kinds of errors when it cannot read a dataset
            raise DataError(f"cannot read {name}: {(str(error) or repr(error)).splitlines()[0]}") from error

    yield from value_blocks(name, values())


def too_large(max_document_bytes: int) -> str:
    return f"larger than {max_document_bytes:,} bytes; raise the limit with --max-document-bytes"


def check_column(column: str, columns: list[str], source: str) -> None:
    if column not in columns:
        names = ", ".join(map(repr, columns))
        raise DataError(f"{source} has no column {column!r} (columns: {names}); choose another with --text-field")
