"""`calm prepare`: sources → tokenizer → shards, with multiple processes and resumable.

The main process reads blocks and writes shards, in order; workers parse and tokenize. Every few seconds the shards are
synced to disk and `progress.json` records the position. Resuming from it produces byte-identical output.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from calm.data.corpus import SPLITS, BadDocument, Source, documents, open_sources, part_of, split_of
from calm.data.readers import Block, DamagedSource
from calm.data.shards import MANIFEST, VERSION, ShardWriter
from calm.data.tokenizer import Tokenizer, load_tokenizer, round_trips, train_bpe
from calm.data.workers import Encoded, PrepareOptions, encode, map_in_order
from calm.data.workspace import PROGRESS, clear, completed_manifest, start_or_resume
from calm.errors import DataError
from calm.files import locked_directory, write_json

PROGRESS_INTERVAL = 2.0  # seconds between updates of progress.json
TOKENIZER_SAMPLE = 2**26  # characters of training text for BPE training
MAX_WARNINGS = 10  # about skipped documents


@dataclass
class Counts:
    """Progress of a preparation."""

    source: int = 0  # completed sources
    block: int = 0  # completed blocks of the current source
    documents: int = 0
    tokens: int = 0
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    skipped: int = 0


@dataclass(frozen=True)
class Report:
    """State for a progress bar."""

    stage: str
    counts: Counts
    bytes_read: int
    bytes_total: int | None


def prepare(
    sources: list[str],
    output: Path | str,
    options: PrepareOptions,
    *,
    shard: str | None = None,
    workers: int | None = None,
    on_bad_document: Literal["fail", "skip"] = "fail",
    resume: bool = False,
    overwrite: bool = False,
    report: Callable[[Report], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Tokenize `sources` into shards in the directory `output`. Returns the manifest.

    With a `shard` of the form "I/N", only part I of N of the corpus is tokenized; `merge` combines the parts.
    """
    output = Path(output)
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if workers < 1:
        raise DataError(f"workers must be at least 1, not {workers}")
    opened = open_sources(sources, options.text_field, options.document_size, options.max_document_bytes)
    if shard is not None and options.tokenizer.partition(":")[0] == "bpe":
        raise DataError(
            f"--tokenizer {options.tokenizer} trains a tokenizer, but all parts must use the same one; train it first "
            "by preparing a sample of the corpus without --shard, then pass the directory 'tokenizer' of its output"
        )
    part = None if shard is None else part_of(opened, shard)
    job: dict[str, Any] = {
        "sources": [[source.name, source.size, source.modified] for source in opened],
        "options": vars(options),
    }
    if part:
        job["part"] = part
    preparation = Preparation(output, opened, options, part, workers, on_bad_document, report, warn)
    return preparation.run(job, resume, overwrite)


class Preparation:
    """One run of the pipeline."""

    command, stage = "calm prepare", "tokenizing"

    def __init__(
        self, output: Path, sources: list[Source], options: PrepareOptions, part, workers, on_bad_document, report, warn
    ):
        self.output, self.sources, self.options, self.part = output, sources, options, part
        self.workers, self.on_bad_document, self.report, self.warn = workers, on_bad_document, report, warn
        self.begin, self.end = (part["begin"], part["end"]) if part else ([0, 1], [len(sources), 1])
        sizes = [source.size for source in sources]
        self.bytes_total = sum(size for size in sizes if size) if all(size is not None for size in sizes) else None
        if part and self.bytes_total:
            self.bytes_total = self.bytes_total * part["number"] // part["of"]

    def run(self, job: dict[str, Any], resume: bool, overwrite: bool) -> dict[str, Any]:
        """Start or resume the job. Returns the manifest."""
        with locked_directory(self.output, self.command):
            if manifest := completed_manifest(self.output, job, resume, overwrite):
                return manifest
            try:
                self.progress = start_or_resume(self.output, job, overwrite)
                try:
                    return self._run(self.progress)
                except DataError:
                    if not self.progress["writers"]:  # nothing to resume
                        clear(self.output)
                    raise
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise DataError(
                    f"no space left on device for {self.output}; free some space and run again with --resume to "
                    "continue"
                ) from error

    def _run(self, progress: dict[str, Any]) -> dict[str, Any]:
        self.counts = Counts(**progress["counts"])
        tokenizer = self._tokenizer()
        self.writers = {s: ShardWriter(self.output, s, tokenizer.dtype, self.options.shard_tokens) for s in SPLITS}
        for split, state in progress["writers"].items():
            self.writers[split].restore(state)
        try:
            self._tokenize()
            if self.counts.documents == 0 and not self.part:
                names = ", ".join(source.name for source in self.sources[:3])
                raise DataError(f"no documents in {names}; pass sources that contain text")
            return self._finish(tokenizer)
        except BaseException:
            if (self.output / MANIFEST).exists():  # the output is complete
                raise
            empty = {"done": [], "open": None}
            for split, writer in self.writers.items():
                writer.rewind(self.progress["writers"].get(split, empty))
            raise

    def _tokenizer(self) -> Tokenizer:
        directory = self.output / "tokenizer"
        if (directory / "tokenizer_config.json").exists():  # written last
            return load_tokenizer(str(directory))
        kind, _, size = self.options.tokenizer.partition(":")
        if kind == "bpe":
            if not size.isdecimal():
                raise DataError(
                    f"tokenizer {self.options.tokenizer!r} must have the form bpe:SIZE, for example bpe:4096"
                )
            tokenizer = train_bpe(self._training_text(), int(size))
            if tokenizer.vocab_size < int(size):
                self.warn(
                    f"the training text supports only {tokenizer.vocab_size:,} of {int(size):,} vocabulary entries"
                )
        else:
            tokenizer = load_tokenizer(self.options.tokenizer)
            if not round_trips(tokenizer):
                self.warn(f"the tokenizer {self.options.tokenizer} is lossy: decoding does not restore the exact text")
        tokenizer.save(directory)
        return tokenizer

    def _training_text(self) -> Iterator[str]:
        """Training documents for the tokenizer, read round-robin from the sources up to TOKENIZER_SAMPLE."""
        readers = [source.blocks() for source in self.sources]
        size = 0
        while readers and size < TOKENIZER_SAMPLE:
            for reader in list(readers):
                try:
                    block = next(reader, None)
                except DamagedSource:  # handled when the source is tokenized
                    block = None
                if block is None:
                    readers.remove(reader)
                    continue
                for text in documents(block, self.options.text_field, self.options.max_document_bytes):
                    if isinstance(text, str) and self._split_of(text) == "train":
                        size += len(text)
                        yield text
                self.report(Report("training the tokenizer", self.counts, size, None))

    def _split_of(self, text: str) -> str:
        return split_of(text, self.options.validation_share, self.options.test_share)

    def _tokenize(self) -> None:
        saved = time.monotonic()
        for source, number, bytes_read, encoded in self._encoded():
            for reason in encoded.bad:
                self._handle_bad(reason)
            for split, (tokens, lengths, size) in encoded.splits.items():
                self.writers[split].append(tokens, lengths)
                self.counts.documents += len(lengths)
                self.counts.tokens += len(tokens)
                self.counts.bytes[split] += size
            self.counts.source, self.counts.block = source, number + 1
            if time.monotonic() - saved > PROGRESS_INTERVAL:
                self._save_progress()
                saved = time.monotonic()
            self.report(Report(self.stage, self.counts, bytes_read, self.bytes_total))

    def _encoded(self) -> Iterator[tuple[int, int, int, Encoded]]:
        """Yield (source, block number, bytes read in all sources, tokenized block) for all remaining blocks."""
        starts = list(accumulate((source.size or 0 for source in self.sources), initial=0))
        arguments = (str(self.output / "tokenizer"), self.options)
        for (source, number, block), encoded in map_in_order(encode, self._blocks(), self.workers, arguments):
            yield source, number, starts[source] + (block.bytes_read if isinstance(block, Block) else 0), encoded

    def _handle_bad(self, reason: str) -> None:
        if self.on_bad_document == "fail":
            raise DataError(f"{reason}; skip such documents with --on-bad-document skip")
        self.counts.skipped += 1
        if self.counts.skipped <= MAX_WARNINGS:
            self.warn(f"skipped {reason}")

    def _blocks(self) -> Iterator[tuple[int, int, Block | BadDocument]]:
        """Yield (source, block number, block) for all remaining blocks. A damaged source ends with a BadDocument."""
        first, done = max((self.counts.source, self.counts.block), (self.begin[0], 0))
        for number, source in enumerate(self.sources[first:], first):
            if [number, 1] >= self.end:
                return
            index = -1
            try:
                for index, block in enumerate(source.blocks()):
                    if [number, block.first] >= self.end:
                        return
                    if index >= done and [number, block.first] >= self.begin:
                        yield number, index, block
            except DamagedSource as error:
                if index + 1 >= done:
                    yield number, index + 1, BadDocument(str(error))
            done = 0

    def _save_progress(self) -> None:
        for writer in self.writers.values():
            writer.sync()
        writers = {split: writer.state() for split, writer in self.writers.items()}
        progress = {**self.progress, "counts": vars(self.counts), "writers": writers}
        write_json(self.output / PROGRESS, progress)
        self.progress = progress

    def _finish(self, tokenizer: Tokenizer) -> dict[str, Any]:
        splits = {}
        for split, writer in self.writers.items():
            shards = [vars(shard) for shard in writer.finish()]
            totals = {total: sum(shard[total] for shard in shards) for total in ("documents", "tokens")}
            splits[split] = {**totals, "bytes": self.counts.bytes[split], "shards": shards}
        manifest: dict[str, Any] = {
            "version": VERSION,
            "dtype": tokenizer.dtype,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_sha256": tokenizer.sha256,
            "sources": [[source.name, source.size] for source in self.sources],
            "options": vars(self.options),
            "skipped_documents": self.counts.skipped,
            "splits": splits,
        }
        if self.part:
            manifest["part"] = self.part
        write_json(self.output / MANIFEST, manifest)
        (self.output / PROGRESS).unlink()
        return manifest
