"""The output directory of a preparation: start, resume or clear it, and protect other files."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from calm.data.corpus import SPLITS
from calm.data.shards import MANIFEST, read_manifest
from calm.errors import DataError
from calm.files import TEMPORARY, write_json

PROGRESS = "progress.json"


def completed_manifest(output: Path, job: dict[str, Any], resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """Return the manifest if this job is already complete. Raises DataError if the directory contains anything else."""
    files = sorted(path.name for path in output.iterdir() if not path.name.endswith(TEMPORARY))
    if not files or (overwrite and _is_preparation(output)):
        return None
    if not _is_preparation(output):
        raise DataError(
            f"{output} contains files that calm prepare did not create ({', '.join(files[:3])}); use another directory"
        )
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
    done = [manifest["options"], manifest["sources"], manifest.get("part")]
    if done != [job["options"], sizes, job.get("part")]:
        raise DataError(f"{output} was prepared from other sources or with other options; replace it with --overwrite")
    return manifest


def _is_preparation(output: Path) -> bool:
    return (output / MANIFEST).exists() or (output / PROGRESS).exists()


def start_or_resume(output: Path, job: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Return the saved progress of an interrupted run of this job, or new progress."""
    if overwrite:
        clear(output)
        output.mkdir(exist_ok=True)
    path = output / PROGRESS
    for temporary in output.rglob(f"*{TEMPORARY}"):
        temporary.unlink()
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
    for a complete one and can still be recognized as a preparation.
    """
    progress = output / PROGRESS
    if not progress.exists() and (output / MANIFEST).exists():
        write_json(progress, {"job": None})
    shards = [path for split in SPLITS for kind in ("tokens", "lengths") for path in output.glob(f"{split}-*.{kind}")]
    tokenizer = [output / "tokenizer" / name for name in ("tokenizer_config.json", "tokenizer.json")]
    for path in [output / MANIFEST, *shards, *tokenizer, progress]:
        path.unlink(missing_ok=True)
    for directory in (output / "tokenizer", output):
        with suppress(OSError):  # not empty, or missing
            directory.rmdir()
