"""`calm merge`: the parts of a corpus, prepared on several machines, → one prepared directory.

A merge is a preparation whose blocks are the shards of the parts, in order. Shards are rewritten, not linked: where
one ends depends on all documents before it. The result has the same bytes as a preparation on one machine.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from calm.data.corpus import SPLITS, Source
from calm.data.prepare import Preparation, Report
from calm.data.shards import MANIFEST, PreparedData
from calm.data.tokenizer import Tokenizer
from calm.data.workers import Encoded, PrepareOptions
from calm.data.workspace import PROGRESS
from calm.errors import DataError
from calm.files import sha256_of


def merge(
    directories: list[Path],
    output: Path | str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    report: Callable[[Report], None] = lambda _: None,
) -> dict[str, Any]:
    """Combine the outputs of `prepare(..., shard="I/N")` in the directory `output`. Returns the manifest."""
    output = Path(output)
    if output.resolve() in [directory.resolve() for directory in directories]:
        raise DataError(f"{output} is one of the parts; use another output directory")
    parts = sorted((_open(directory) for directory in directories), key=lambda part: part.manifest["part"]["number"])
    _check(parts)
    job = {
        "sources": [[*source, None] for source in parts[0].manifest["sources"]],
        "options": parts[0].manifest["options"],
        "parts": [sha256_of(part.directory / MANIFEST) for part in parts],
    }
    return _Merge(output, parts, report).run(job, resume, overwrite)


def _open(directory: Path) -> PreparedData:
    if (directory / PROGRESS).exists() and not (directory / MANIFEST).exists():
        raise DataError(f"{directory} contains an unfinished preparation; continue it with calm prepare --resume")
    part = PreparedData(directory, verify=False, allow_part=True)
    if "part" not in part.manifest:
        raise DataError(
            f"{directory} was prepared without --shard; calm merge combines outputs of calm prepare --shard"
        )
    return part


def _check(parts: list[PreparedData]) -> None:
    """Raise DataError unless these are all parts of one corpus, in order, prepared with the same settings."""
    first, expected = parts[0], _settings(parts[0].manifest)
    for part in parts[1:]:
        actual = _settings(part.manifest)
        for name in {**expected, **actual}:
            if actual.get(name) != expected.get(name):
                raise DataError(
                    f"{first.directory} and {part.directory} are parts of different preparations: their {name} is "
                    f"{expected.get(name)!r} and {actual.get(name)!r}; prepare all parts with the same settings"
                )
    of = first.manifest["part"]["of"]
    if (numbers := [part.manifest["part"]["number"] for part in parts]) != list(range(1, of + 1)):
        given = ", ".join(f"{number} ({part.directory})" for number, part in zip(numbers, parts, strict=True))
        raise DataError(f"parts 1 to {of} are needed, each once, but the parts given are {given}")
    for part, after in pairwise(parts):
        if part.manifest["part"]["end"] != after.manifest["part"]["begin"]:
            raise DataError(
                f"{after.directory} does not begin where {part.directory} ends: the sources, or the versions of "
                "calm's dependencies, differ between the machines; make them equal and prepare both parts again"
            )


def _settings(manifest: dict[str, Any]) -> dict[str, Any]:
    sources = {f"source {number}": source for number, source in enumerate(manifest["sources"], 1)}
    tokenizer = {"tokenizer SHA-256": manifest["tokenizer_sha256"]}
    return {"number of parts": manifest["part"]["of"], **sources, **manifest["options"], **tokenizer}


class _Merge(Preparation):
    """A preparation that reads the shards of its parts instead of sources."""

    command, stage = "calm merge", "merging"

    def __init__(self, output: Path, parts: list[PreparedData], report: Callable[[Report], None]):
        manifest = parts[0].manifest
        sources = [Source(name, size, None, lambda: iter(())) for name, size in manifest["sources"]]
        super().__init__(
            output, sources, PrepareOptions(**manifest["options"]), None, 1, "fail", report, lambda _: None
        )
        self.parts, self.itemsize = parts, np.dtype(manifest["dtype"]).itemsize
        self.bytes_total = self.itemsize * sum(self._total("tokens").values())

    def _total(self, what: str) -> dict[str, int]:
        return {split: sum(part.manifest["splits"][split][what] for part in self.parts) for split in SPLITS}

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.parts[0].tokenizer
        tokenizer.save(self.output / "tokenizer")
        return tokenizer

    def _encoded(self) -> Iterator[tuple[int, int, int, Encoded]]:
        self.counts.skipped = sum(part.manifest["skipped_documents"] for part in self.parts)
        self.counts.bytes = self._total("bytes")
        done, bytes_read = (self.counts.source, self.counts.block), 0
        for number, part in enumerate(self.parts):
            shards = [(split, index, shard) for split in SPLITS for index, shard in enumerate(part.shards(split))]
            streams = {split: part.split(split) for split in SPLITS}
            for block, (split, index, shard) in enumerate(shards):
                bytes_read += self.itemsize * shard.tokens
                if (number, block) >= done:
                    part.check(shard, verify=True)
                    tokens, lengths = streams[split].parts[index], streams[split].lengths[index]
                    yield number, block, bytes_read, Encoded({split: (tokens, lengths, 0)}, [])
