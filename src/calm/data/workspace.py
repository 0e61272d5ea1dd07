"""The directory of a preparation: begun, continued or cleared, never mixed up with others."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from calm.data.corpus import SPLITS
from calm.data.shards import MANIFEST, read_manifest
from calm.errors import DataError
from calm.files import TEMPORARY, write_json

PROGRESS = "progress.json"


def finished(output: Path, job: dict[str, Any], resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """The manifest, if this very job is done already; an error, if the directory holds anything else."""
    found = sorted(path.name for path in output.iterdir() if not path.name.endswith(TEMPORARY))
    if not found or (overwrite and is_ours(output)):
        return None
    if not is_ours(output):
        raise DataError(f"{output} holds files that calm prepare did not make ({', '.join(found[:3])}); name another")
    if not resume:
        state = "a finished" if MANIFEST in found else "an unfinished"
        raise DataError(
            f"{output} holds {state} preparation; continue it with --resume, or replace it with --overwrite"
        )
    if MANIFEST not in found:
        return None
    manifest = read_manifest(output)
    sizes = [[name, size] for name, size, _ in job["sources"]]
    (output / PROGRESS).unlink(missing_ok=True)  # left by a crash between the manifest and the end
    if manifest["options"] != job["options"] or manifest["sources"] != sizes:
        raise DataError(f"{output} was prepared from other sources or options; replace it with --overwrite")
    return manifest


def is_ours(output: Path) -> bool:
    return (output / MANIFEST).exists() or (output / PROGRESS).exists()


def begin(output: Path, job: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Where to go on: the record of an interrupted run of this job, or the beginning."""
    if overwrite:
        clear(output)
        output.mkdir(exist_ok=True)
    path = output / PROGRESS
    for left in output.rglob(f"*{TEMPORARY}"):
        left.unlink()
    if not path.exists():
        progress = {"job": job, "counts": {}, "writers": {}}
        write_json(path, progress)
        return progress
    progress = json.loads(path.read_bytes())
    if progress["job"] != job:
        raise DataError(
            f"{output} holds an unfinished preparation of other sources or options, or a source has changed since; "
            "begin anew with --overwrite"
        )
    return progress


def clear(output: Path) -> None:
    """Remove what a preparation made, and nothing else. Killed on the way, the directory is still known as ours:
    the manifest goes first, so that a part is never taken for the whole, and the record of progress last."""
    progress = output / PROGRESS
    if not progress.exists() and (output / MANIFEST).exists():
        write_json(progress, {"job": None})
    shards = [path for split in SPLITS for kind in ("tokens", "lengths") for path in output.glob(f"{split}-*.{kind}")]
    tokenizer = [output / "tokenizer" / name for name in ("tokenizer_config.json", "tokenizer.json")]
    for path in [output / MANIFEST, *shards, *tokenizer, progress]:
        path.unlink(missing_ok=True)
    for directory in (output / "tokenizer", output):
        with suppress(OSError):  # not empty, or not there
            directory.rmdir()
