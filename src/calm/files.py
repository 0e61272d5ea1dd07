"""Files that are either whole or absent: written aside, synced, renamed; and their checksums."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp"


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` so that a reader, or a crash, sees the old file or the new one, never a part."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
