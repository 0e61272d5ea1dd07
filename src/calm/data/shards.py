"""Tokens on disk: memory-mapped shards and their manifest.

DIR/manifest.json              counts, checksums, sources, options, part; written last: its presence marks complete data
DIR/tokenizer/                 the tokenizer of the shards
DIR/train-00000.tokens         token ids of all documents, concatenated, uint16 or uint32
DIR/train-00000.lengths        number of tokens of each document, uint32
"""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from calm.data.tokenizer import Tokenizer, load_tokenizer
from calm.errors import DataError
from calm.files import sha256_of

MANIFEST = "manifest.json"
VERSION = 1


@dataclass
class Shard:
    """One pair of files. A document never spans two shards."""

    name: str
    documents: int = 0
    tokens: int = 0
    tokens_sha256: str = ""
    lengths_sha256: str = ""

    def files(self, directory: Path) -> tuple[Path, Path]:
        return directory / f"{self.name}.tokens", directory / f"{self.name}.lengths"


class ShardWriter:
    """Appends documents of one split to shards. `state` and `restore` make it resumable after a crash."""

    def __init__(self, directory: Path, split: str, dtype: str, shard_tokens: int):
        self.directory, self.split, self.dtype, self.shard_tokens = (
            directory,
            split,
            np.dtype(dtype),
            shard_tokens,
        )
        self.done: list[Shard] = []
        self.open: Shard | None = None

    def append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: their concatenated token ids, and the number of tokens of each."""
        ends = np.cumsum(lengths, dtype=np.int64)
        document = position = 0
        while document < len(lengths):
            if self.open is None:
                self._start(Shard(f"{self.split}-{len(self.done):05d}"))
            assert self.open
            room = self.shard_tokens - self.open.tokens
            # The document that exceeds the limit still goes into this shard.
            last = min(int(np.searchsorted(ends, position + room)) + 1, len(lengths))
            end = int(ends[last - 1])
            self._write(tokens[position:end], lengths[document:last])
            document, position = last, end
            if self.open.tokens >= self.shard_tokens:
                self._finish()

    def _start(self, shard: Shard) -> None:
        """Open a shard for appending after the tokens and documents that `shard` counts; truncate the rest."""
        self.open = shard
        sizes = shard.tokens * self.dtype.itemsize, shard.documents * 4
        self._files, self._hashes = [], []
        for path, size in zip(shard.files(self.directory), sizes, strict=True):
            file = path.open("r+b" if size else "wb")
            checksum = hashlib.sha256()
            for _ in range(0, size, 2**20):
                checksum.update(file.read(min(2**20, size - file.tell())))
            if file.tell() != size:
                raise DataError(f"{path} is shorter than recorded in the progress file; start over with --overwrite")
            file.truncate(size)
            self._files.append(file)
            self._hashes.append(checksum)

    def _write(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        assert self.open
        for file, checksum, values in zip(self._files, self._hashes, (tokens, lengths.astype(np.uint32)), strict=True):
            file.write(values)
            checksum.update(values)
        self.open.tokens += len(tokens)
        self.open.documents += len(lengths)

    def _finish(self) -> None:
        assert self.open
        self.sync()
        self.open.tokens_sha256, self.open.lengths_sha256 = (checksum.hexdigest() for checksum in self._hashes)
        for file in self._files:
            file.close()
        self.done.append(self.open)
        self.open = None

    def sync(self) -> None:
        if self.open:
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())

    def state(self) -> dict[str, Any]:
        """The shards on disk. Call `sync` first."""
        return {
            "done": [asdict(shard) for shard in self.done],
            "open": asdict(self.open) if self.open else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Return to an earlier `state`; later data is truncated."""
        self.done = [Shard(**shard) for shard in state["done"]]
        if state["open"]:
            self._start(Shard(**state["open"]))

    def rewind(self, state: dict[str, Any]) -> None:
        """After a failed write: truncate files to an earlier `state` and delete newer ones."""
        kept = {shard["name"]: shard for shard in [*state["done"], state["open"]] if shard}
        for shard in [*self.done, *([self.open] if self.open else [])]:
            if shard is self.open:
                for file in self._files:
                    with suppress(OSError):  # the buffered data may not fit on the disk
                        file.close()
            for path, count, size in zip(
                shard.files(self.directory), ("tokens", "documents"), (self.dtype.itemsize, 4), strict=True
            ):
                if shard.name in kept:
                    os.truncate(path, kept[shard.name][count] * size)
                else:
                    path.unlink(missing_ok=True)
        self.open = None

    def finish(self) -> list[Shard]:
        if self.open:
            self._finish()
        return self.done


@dataclass(frozen=True)
class TokenStream:
    """The token ids of one split as one long array, memory-mapped from disk."""

    parts: list[np.ndarray]
    lengths: list[np.ndarray] = field(repr=False)

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0, *(len(part) for part in self.parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(len(self))
        slices = []
        part = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            offset = int(self._starts[part])
            slices.append(self.parts[part][start - offset : stop - offset])
            start += len(slices[-1])
            part += 1
        return slices[0] if len(slices) == 1 else np.concatenate([np.empty(0, np.uint16), *slices])

    @cached_property
    def document_lengths(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int64), *self.lengths], dtype=np.int64, casting="unsafe")

    @cached_property
    def _document_ends(self) -> np.ndarray:
        return np.cumsum(self.document_lengths)

    def document_range(self, document: int) -> tuple[int, int]:
        end = int(self._document_ends[document])
        return end - int(self.document_lengths[document]), end


class PreparedData:
    """A directory created by `calm prepare`."""

    def __init__(self, directory: Path | str, verify: bool = True, allow_part: bool = False):
        """Open a prepared directory. With `verify`, read every shard once and compare checksums.

        A directory of `calm prepare --shard` holds only a part of the corpus and is refused without `allow_part`.
        """
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory)
        if (part := self.manifest.get("part")) and not allow_part:
            raise DataError(
                f"{self.directory} is part {part['number']} of {part['of']} of a corpus; combine all parts with "
                "calm merge and use its output"
            )
        if self.tokenizer.sha256 != self.manifest["tokenizer_sha256"]:
            raise DataError(
                f"the tokenizer in {self.directory / 'tokenizer'} does not match the shards; restore the original "
                "tokenizer, or prepare the data again with --overwrite"
            )
        for split in self.manifest["splits"]:
            for shard in self.shards(split):
                self.check(shard, verify)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(str(self.directory / "tokenizer"))

    def split(self, name: str) -> TokenStream:
        if name not in self.manifest["splits"]:
            raise DataError(f"{self.directory} has no split {name!r}; choose from {', '.join(self.manifest['splits'])}")
        shards = [shard.files(self.directory) for shard in self.shards(name)]
        return TokenStream(
            [np.memmap(tokens, dtype=self.manifest["dtype"], mode="r") for tokens, _ in shards],
            [np.fromfile(lengths, dtype=np.uint32) for _, lengths in shards],
        )

    def shards(self, split: str) -> list[Shard]:
        return [Shard(**shard) for shard in self.manifest["splits"][split]["shards"]]

    def check(self, shard: Shard, verify: bool) -> None:
        """Compare the sizes, and with `verify` the checksums, of the files of a shard with the manifest."""
        sizes = shard.tokens * np.dtype(self.manifest["dtype"]).itemsize, shard.documents * 4
        checksums = shard.tokens_sha256, shard.lengths_sha256
        for path, size, checksum in zip(shard.files(self.directory), sizes, checksums, strict=True):
            if not path.exists():
                raise DataError(f"{path} is missing; prepare the data again with --overwrite")
            if path.stat().st_size != size:
                raise DataError(
                    f"{path} has {path.stat().st_size:,} bytes, but the manifest says {size:,}; "
                    "restore it, or prepare the data again with --overwrite"
                )
            if verify and (actual := sha256_of(path)) != checksum:
                raise DataError(
                    f"{path} has changed since it was prepared: its SHA-256 is {actual}, the manifest says {checksum}; "
                    "restore it, or prepare the data again with --overwrite"
                )


def read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.exists():
        reason = "no such directory" if not directory.exists() else f"no {MANIFEST} in it"
        raise DataError(f"{directory} is not a prepared dataset ({reason}); create one with calm prepare")
    try:
        manifest = json.loads(path.read_bytes())
        version = manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); prepare the data again in another directory") from error
    if version != VERSION:
        raise DataError(
            f"{path} has version {version}, but this version of calm reads {VERSION}; prepare the data again"
        )
    return manifest
