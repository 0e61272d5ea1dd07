"""Atomic file writes, directory locks and checksums."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calm.errors import UserError

TEMPORARY = ".tmp"


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash, the path has either the old or the new content."""
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
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk with fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked_directory(directory: Path, by: str) -> Iterator[None]:
    """Create a directory and lock it for this process. The lock is released when the process exits for any reason.

    `by` is the command that holds the lock, for the error message.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{directory} is a file, not a directory; use another path") from None
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise UserError(f"another {by} is writing to {directory}; wait for it, or use another directory") from None
        raise UserError(
            f"cannot lock {directory} ({error.strerror}); use a directory on another file system"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
