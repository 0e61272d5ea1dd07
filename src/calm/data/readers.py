"""Files → blocks: raw documents in pieces of about a megabyte, for every form and compression we read."""

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

BLOCK_SIZE = 2**20  # bytes: small against memory, large against the cost of sending it to a worker
LONGEST_VALUE = 2**28  # bytes: what is longer is not the form that the file's name says
SMALLEST_DOCUMENT = 4  # bytes of plain text: the longest character
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


class Unpacked:
    """Pieces of an unpacked file, without a byte-order mark. Damage ends them, and is kept for whoever reads on."""

    def __init__(self, path: Path):
        self.path = path
        self.position = 0  # how far the file on disk was read
        self.damage: DamagedSource | None = None

    def __iter__(self) -> Iterator[bytes]:
        total = 0
        with self.path.open("rb") as file:
            try:
                for piece in _unpack(file, self.path.suffix):
                    self.position = file.tell()
                    yield piece.removeprefix(codecs.BOM_UTF8) if total == 0 else piece
                    total += len(piece)
            except (EOFError, OSError) as error:
                if total == 0:
                    raise DataError(f"{self.path} is not a {self.path.suffix} file, or is damaged ({error})") from error
                self.damage = DamagedSource(
                    f"{self.path} ends too early or is damaged after {total:,} unpacked bytes ({error}); fetch it "
                    "again, or keep what can be read with --on-bad-document skip"
                )


def _unpack(file: IO[bytes], suffix: str) -> Iterator[bytes]:
    if suffix == ".gz":
        return _members(file, lambda: zlib.decompressobj(31), zlib.error)
    if suffix == ".zst":
        zstandard = optional("zstandard")
        decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
        return _members(file, decompressor.decompressobj, zstandard.ZstdError)
    return iter(lambda: file.read(BLOCK_SIZE), b"")


def _members(file: IO[bytes], begin: Callable[[], Any], failure: type[Exception]) -> Iterator[bytes]:
    """A packed file is a row of members; only one that is under way at the end of the file is an error."""
    member = None
    while packed := file.read(2**16):
        while packed := packed.lstrip(b"\0") if member is None else packed:  # zeros may pad what stands between
            member = member or begin()
            try:
                if piece := member.decompress(packed):
                    yield piece
            except failure as error:
                raise EOFError(str(error)) from error
            packed, member = member.unused_data, None if member.eof else member
    if member is not None:
        raise EOFError("it stops in the middle")


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
    number, offset, rest = 1, 0, b""
    pieces = Unpacked(path)
    for piece in pieces:
        rest += piece
        end = rest.rfind(b"\n") if len(rest) >= BLOCK_SIZE else -1
        if end >= 0:
            lines = rest[:end].split(b"\n")
            yield Block(str(path), "line", lines, number, offset, pieces.position)
            number, offset, rest = number + len(lines), offset + end + 1, rest[end + 1 :]
        elif len(rest) > LONGEST_VALUE:
            raise DataError(f"{path}, line {number} is longer than {LONGEST_VALUE:,} bytes: no JSON Lines file")
    if rest := _undamaged(rest, pieces):
        yield Block(str(path), "line", rest.split(b"\n"), number, offset, pieces.position)
    if pieces.damage:
        raise pieces.damage


def text_blocks(path: Path, document_size: int, **_: Any) -> Iterator[Block]:
    """Plain text has no marks for documents: a long file is cut at a paragraph every `document_size` bytes."""
    documents: list[bytes] = []
    number, offset, held, rest = 1, 0, 0, b""
    pieces = Unpacked(path)
    for piece in pieces:
        rest += piece
        while len(rest) >= 2 * document_size:
            cut = _paragraph_end(rest, document_size)
            documents.append(rest[:cut])
            rest, held = rest[cut:], held + cut
            if held >= BLOCK_SIZE:
                yield Block(str(path), "text", documents, number, offset, pieces.position)
                number, offset, documents, held = number + len(documents), offset + held, [], 0
    if rest := _undamaged(rest, pieces):
        documents.append(rest)
    if documents:
        yield Block(str(path), "text", documents, number, offset, pieces.position)
    if pieces.damage:
        raise pieces.damage


def _undamaged(rest: bytes, pieces: Unpacked) -> bytes:
    """The end of a file; of a damaged one, its whole lines."""
    return rest[: rest.rfind(b"\n") + 1] if pieces.damage else rest


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
    pieces, damage = Unpacked(path), None

    def values() -> Iterator[Any]:
        nonlocal damage
        try:
            yield from _json_values(_decoded(pieces))
            damage = pieces.damage
        except ValueError as error:  # what stands behind it cannot be told apart any more
            rest = "; the rest of the file can be left out with --on-bad-document skip"
            damage = pieces.damage or DamagedSource(f"{path}: {error}{rest}")

    yield from value_blocks(str(path), values(), lambda: pieces.position)
    if damage:
        raise damage


def _decoded(pieces: Iterable[bytes]) -> Iterator[str]:
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    for piece in chain(pieces, [b""]):
        held = len(decoder.getstate()[0])  # the beginning of a character whose end is in this piece
        try:
            yield decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            raise ValueError(f"not valid UTF-8 at byte {offset - held + error.start}") from None
        offset += len(piece)


def _json_values(pieces: Iterator[str]) -> Iterator[Any]:
    """The documents in a stream of JSON, one at a time."""
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,]*")
    text, at, number, in_array, more = "", 0, 1, False, True

    def read(at_least: int) -> None:
        nonlocal text, at, more
        text, at = text[at:], 0
        while more and len(text) < at_least:
            piece = next(pieces, None)
            more, text = piece is not None, text + (piece or "")

    while True:
        at = cast(re.Match, between.match(text, at)).end()
        left = len(text) - at
        if left == 0 and more:
            read(1)
        elif left == 0:
            if in_array:
                raise ValueError("the array has no end")
            return
        elif text[at] == "[" and number == 1 and not in_array:
            in_array, at = True, at + 1
        elif text[at] == "]" and in_array:
            in_array, at = False, at + 1
        else:
            try:
                value, end = decoder.raw_decode(text, at)
            except (json.JSONDecodeError, RecursionError) as error:
                if not more or left > LONGEST_VALUE:
                    raise ValueError(f"document {number}: not JSON ({error})") from error
                read(2 * left)  # doubling: a huge document is not parsed over and over
                continue
            if end == len(text) and more:  # a number could go on in the next piece
                read(left + 1)
                continue
            yield value
            at, number = end, number + 1


def parquet_blocks(path: Path, text_field: str, **_: Any) -> Iterator[Block]:
    """One column of a table; a packed table is unpacked to a temporary file, since its index is at the end."""
    parquet, arrow = optional("pyarrow.parquet"), optional("pyarrow")
    with tempfile.TemporaryFile() as plain:
        if path.suffix in COMPRESSIONS:
            pieces = Unpacked(path)
            plain.writelines(pieces)
            if pieces.damage:
                raise pieces.damage
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
