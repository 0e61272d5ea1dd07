"""Files → blocks: raw documents in pieces of about a megabyte, for every form and compression we read."""

import codecs
import gzip
import importlib
import json
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from calm.errors import DataError

BLOCK_SIZE = 2**20  # bytes: small against memory, large against the cost of sending it to a worker
LONGEST_VALUE = 2**28  # bytes: what is longer is not the form that the file's name says
COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class Block:
    """Some consecutive raw documents of one source."""

    source: str
    form: Literal["text", "line", "value"]
    values: list[Any]  # text and line: bytes; value: what JSON or a table held
    first: int  # number of the first value, from 1
    offset: int = 0  # where the first value begins in the unpacked file
    bytes_read: int = 0  # how far the file on disk has been read, for the progress bar


class DamagedSource(DataError):
    """A file that cannot be read to its end; what came before was good."""


def unpacked(path: Path) -> Iterator[tuple[bytes, int]]:
    """Pieces of the unpacked file, each with how far the file on disk was read; no byte-order mark."""
    unpack = {".gz": _gunzip, ".zst": _unzstd}.get(path.suffix, _plain)
    total = 0
    with path.open("rb") as file:
        try:
            for piece in unpack(file):
                yield (piece.removeprefix(codecs.BOM_UTF8) if total == 0 else piece), file.tell()
                total += len(piece)
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, gzip.BadGzipFile) and total == 0:
                raise DataError(f"{path} is not a gzip file ({error})") from error
            raise DamagedSource(
                f"{path} ends too early or is damaged after {total:,} unpacked bytes ({error}); fetch it again, "
                "or keep what can be read with --on-bad-document skip"
            ) from error


def _plain(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(BLOCK_SIZE):
        yield piece


def _gunzip(file: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as unpacked_file:
        while piece := unpacked_file.read(BLOCK_SIZE):
            yield piece


def _unzstd(file: IO[bytes]) -> Iterator[bytes]:
    zstandard = optional("zstandard")
    frame = None  # a file is a row of frames; only a frame that is under way at the end is an error
    while packed := file.read(2**16):
        while packed:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            try:
                if piece := frame.decompress(packed):
                    yield piece
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            packed = frame.unused_data
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last zstd frame is not whole")


def optional(module: str) -> Any:
    """A module of the `data` extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"this source needs {module.partition('.')[0]}; install it with: pip install 'calm-lm[data]'"
        ) from error


def line_blocks(path: Path, **_: Any) -> Iterator[Block]:
    """JSON Lines: whole lines, parsed later by the workers."""
    number, offset, rest, bytes_read = 1, 0, b"", 0
    for piece, bytes_read in unpacked(path):
        rest += piece
        end = rest.rfind(b"\n") if len(rest) >= BLOCK_SIZE else -1
        if end >= 0:
            lines = rest[:end].split(b"\n")
            yield Block(str(path), "line", lines, number, offset, bytes_read)
            number, offset, rest = number + len(lines), offset + end + 1, rest[end + 1 :]
        elif len(rest) > LONGEST_VALUE:
            raise DataError(f"{path}, line {number} is longer than {LONGEST_VALUE:,} bytes: no JSON Lines file")
    if rest:
        yield Block(str(path), "line", rest.split(b"\n"), number, offset, bytes_read)


def text_blocks(path: Path, document_size: int, **_: Any) -> Iterator[Block]:
    """Plain text has no marks for documents: a long file is cut at a paragraph every `document_size` bytes."""
    pieces: list[bytes] = []
    number, offset, held, rest, bytes_read = 1, 0, 0, b"", 0
    for piece, bytes_read in unpacked(path):
        rest += piece
        while len(rest) >= 2 * document_size:
            cut = _paragraph_end(rest, document_size)
            pieces.append(rest[:cut])
            rest, held = rest[cut:], held + cut
            if held >= BLOCK_SIZE:
                yield Block(str(path), "text", pieces, number, offset, bytes_read)
                number, offset, pieces, held = number + len(pieces), offset + held, [], 0
    pieces += [rest] if rest else []
    if pieces:
        yield Block(str(path), "text", pieces, number, offset, bytes_read)


def _paragraph_end(text: bytes, size: int) -> int:
    """Where to cut: behind the first blank line after `size`, else a line end, else between two characters."""
    for mark in (b"\n\n", b"\r\n\r\n", b"\n"):
        found = text.find(mark, size, 2 * size)
        if found >= 0:
            return found + len(mark)
    return next((cut for cut in range(size, size - 4, -1) if text[cut] & 0xC0 != 0x80), size)


def value_blocks(source: str, values: Iterable[Any], bytes_read: Callable[[], int] = lambda: 0) -> Iterator[Block]:
    """Values that are documents already, gathered to blocks."""
    held: list[Any] = []
    number, size = 1, 0
    for value in values:
        held.append(value)
        size += sum(len(text) for text in value.values() if isinstance(text, str)) if isinstance(value, dict) else 0
        size += len(value) if isinstance(value, str) else 8
        if size >= BLOCK_SIZE:
            yield Block(source, "value", held, number, bytes_read=bytes_read())
            number, held, size = number + len(held), [], 0
    if held:
        yield Block(source, "value", held, number, bytes_read=bytes_read())


def json_blocks(path: Path, **_: Any) -> Iterator[Block]:
    """`.json`: an array of documents, one document, or documents one after another."""
    position = 0

    def pieces() -> Iterator[str]:
        nonlocal position
        decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
        for piece, position in unpacked(path):  # noqa: B007 - read by value_blocks
            try:
                yield decoder.decode(piece)
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: not valid UTF-8 at byte {offset + error.start}") from error
            offset += len(piece)

    yield from value_blocks(str(path), _json_values(pieces(), path), lambda: position)


def _json_values(pieces: Iterator[str], path: Path) -> Iterator[Any]:
    decoder, text, wanted, more = json.JSONDecoder(), "", 1, True
    number = 1
    while True:
        while more and len(text) < wanted:
            piece = next(pieces, None)
            more, text = piece is not None, text + (piece or "")
        text = text.lstrip(" \t\r\n,[]")
        if not text and not more:
            return
        try:
            value, end = decoder.raw_decode(text)
        except (json.JSONDecodeError, RecursionError) as error:
            if not more or len(text) > LONGEST_VALUE:
                raise DataError(f"{path}, document {number}: not JSON ({error})") from error
            wanted = 2 * len(text) + 1  # doubling: a huge document is not parsed over and over
            continue
        if end == len(text) and more:  # a number could go on in the next piece
            wanted = len(text) + 1
            continue
        yield value
        text, wanted, number = text[end:], 1, number + 1


def parquet_blocks(path: Path, text_field: str, **_: Any) -> Iterator[Block]:
    """One column of a table; a packed table is unpacked to a temporary file, since its index is at the end."""
    parquet, arrow = optional("pyarrow.parquet"), optional("pyarrow")
    with tempfile.TemporaryFile() as plain:
        if path.suffix in COMPRESSIONS:
            for piece, _position in unpacked(path):
                plain.write(piece)
        try:
            table = parquet.ParquetFile(plain if path.suffix in COMPRESSIONS else path)
            check_column(text_field, table.schema_arrow.names, str(path))
            size, rows, done = path.stat().st_size, table.metadata.num_rows, 0

            def values() -> Iterator[Any]:
                nonlocal done
                for batch in table.iter_batches(batch_size=256, columns=[text_field]):
                    done += batch.num_rows
                    yield from batch.column(0).to_pylist()

            yield from value_blocks(str(path), values(), lambda: size * done // rows)
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a parquet file, or is damaged ({error})") from error


def hub_blocks(name: str, text_field: str) -> Iterator[Block]:
    """`hf:NAME[:config][:split]`, streamed through `datasets`."""
    datasets = optional("datasets")
    path, config, split, *surplus = [*name.removeprefix("hf:").split(":"), "", ""]
    if any(surplus):
        raise DataError(f"{name!r} has too many parts; it should read hf:NAME[:config][:split]")

    def values() -> Iterator[Any]:
        try:
            rows = datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
            for number, row in enumerate(rows):
                if number == 0:
                    check_column(text_field, list(row), name)
                yield row[text_field]
        except DataError:
            raise
        except Exception as error:  # datasets raises errors of many kinds; each means that this name cannot be read
            raise DataError(f"cannot read {name}: {(str(error) or repr(error)).splitlines()[0]}") from error

    yield from value_blocks(name, values())


def check_column(column: str, columns: list[str], source: str) -> None:
    if column not in columns:
        names = ", ".join(map(repr, columns))
        raise DataError(f"{source} has no column {column!r} (columns: {names}); --text-field names another one")
