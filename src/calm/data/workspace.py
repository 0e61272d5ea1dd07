"""The output directory of a preparation: start, resume or clear it, and protect other files.

A manifest or progress file is recognized by its content, and only the files that it lists are deleted.
"""

import json
import re
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from calm.data.corpus import SPLITS
from calm.data.shards import MANIFEST, Shard, read_manifest
from calm.errors import DataError
from calm.files import TEMPORARY, write_json

PROGRESS = "progress.json"
TOKENIZER_FILES = ("tokenizer/tokenizer_config.json", "tokenizer/tokenizer.json")
MANIFEST_FIELDS = {"version", "dtype", "vocab_size", "tokenizer_sha256", "sources", "options", "splits"}
SHARD_NAME = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}")


def completed_manifest(output: Path, job: dict[str, Any], resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """Return the manifest if this job is already complete. Raises DataError if the directory contains anything else."""
    temporary = _temporary_files(output)
    files = sorted(path.name for path in output.iterdir() if path not in temporary)
    if not files:
        return None
    records = {name: _record(output / name) for name in (MANIFEST, PROGRESS) if name in files}
    foreign = [name for name, record in records.items() if record is None]
    if foreign or not records:
        raise DataError(
            f"{output} contains files that calm prepare did not create ({', '.join((foreign or files)[:3])}); "
            "use another directory"
        )
    if overwrite:
        return None
    if not resume:
        state = "a finished" if MANIFEST in files else "an unfinished"
        raise DataError(
            f"{output} contains {state} preparation; continue it with --resume, or replace it with --overwrite"
        )
    if MANIFEST not in files:
        return None
    manifest = read_manifest(output)
    sizes = [[name, size] for name, size, _ in job["sources"]]
    (output / PROGRESS).unlink(missing_ok=True)  # left by a crash after the manifest was written
    options = {**job["options"], **manifest["options"]}  # earlier versions had fewer options
    done = [options, manifest["sources"], manifest.get("part")]
    if done != [job["options"], sizes, job.get("part")]:
        raise DataError(f"{output} was prepared from other sources or with other options; replace it with --overwrite")
    return manifest


def _record(path: Path) -> dict[str, Any] | None:
    """The content of a manifest or progress file, or None if it is not one of ours."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if path.name == MANIFEST:
        return record if record.keys() >= MANIFEST_FIELDS else None
    job = record.get("job", "")
    return record if job is None or (isinstance(job, dict) and job.keys() >= {"sources", "options"}) else None


def _temporary_files(output: Path) -> list[Path]:
    """Where `write_atomic` leaves incomplete files if it is killed."""
    return [output / (name + TEMPORARY) for name in (MANIFEST, PROGRESS, *TOKENIZER_FILES)]


def start_or_resume(output: Path, job: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Return the saved progress of an interrupted run of this job, or new progress."""
    if overwrite:
        clear(output)
        output.mkdir(exist_ok=True)
    path = output / PROGRESS
    for temporary in _temporary_files(output):
        temporary.unlink(missing_ok=True)
    if not path.exists():
        progress = {"job": job, "counts": {}, "writers": {}}
        write_json(path, progress)
        return progress
    progress = json.loads(path.read_bytes())
    if progress["job"] != job:
        raise DataError(
            f"{output} contains an unfinished preparation with other sources or options, or a source has changed; "
            "start over with --overwrite"
        )
    return progress


def clear(output: Path) -> None:
    """Delete the files of a preparation and nothing else.

    The manifest is deleted first and the progress file last: after a crash in between, the directory is not mistaken
    for a complete one, and can still be recognized as a preparation that lists its shards.
    """
    progress, manifest = output / PROGRESS, _record(output / MANIFEST)
    if manifest is not None:
        write_json(progress, {"job": None, "writers": manifest["splits"]})
    names = _shard_names(_record(progress) or {}, output)
    shards = [path for name in sorted(names) for path in Shard(name).files(output)]
    for path in [output / MANIFEST, *shards, *(output / name for name in TOKENIZER_FILES), *_temporary_files(output)]:
        path.unlink(missing_ok=True)
    progress.unlink(missing_ok=True)
    for directory in (output / "tokenizer", output):
        with suppress(OSError):  # not empty, or missing
            directory.rmdir()


def _shard_names(progress: dict[str, Any], output: Path) -> set[str]:
    """The shards of a preparation: those it recorded, and those it began after it was last recorded."""
    names = _listed(progress.get("writers"))
    for split in SPLITS if progress.get("job") else ():
        for number in count(sum(name.startswith(split) for name in names)):
            shard = Shard(f"{split}-{number:05d}")
            if not any(path.exists() for path in shard.files(output)):
                break
            names.add(shard.name)
    return names


def _listed(record: Any) -> set[str]:
    """The names of the shards in (a part of) a manifest or progress file."""
    if isinstance(record, dict):
        own = {name for name in [record.get("name")] if isinstance(name, str) and SHARD_NAME.fullmatch(name)}
        return own.union(*map(_listed, record.values()))
    return set().union(*map(_listed, record)) if isinstance(record, list) else set()
