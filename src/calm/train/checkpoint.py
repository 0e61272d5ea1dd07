"""Checkpoints: written atomically in the background while training continues, verified when loaded.

    RUN/checkpoints/step-00001000/
      shard-*.safetensors    parameters and optimizer state, saved by torch.distributed.checkpoint and loadable with
                             any number of processes
      checkpoint.json        step, score, configuration, versions, SHA-256 of the shards and of itself; written last

All random numbers of a run derive from its seed, the step and the row, so there is no generator state to save.
"""

import hashlib
import json
import platform
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.tensor import DTensor

from calm import __version__
from calm.distributed import World
from calm.errors import UserError, one_line
from calm.files import sha256_of, sync, write_json

RECORD = "checkpoint.json"
OLDEST_RESUMABLE = (0, 2)  # versions before it have other names of recipe fields and weights
UNFINISHED, DELETED, DAMAGED = ".writing", ".deleting", ".damaged"
LARGEST_FILE = 2**28  # bytes per file, unless a single tensor is larger

# Training in a single process is intended: do not warn at every checkpoint.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Flat state dict of the parameters, buffers and optimizer state. The tensors are not copied."""
    state: dict[str, Any] = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    moments: Any = get_optimizer_state_dict(model, optimizer)["state"]
    return state | {f"optimizer.{name}.{key}": v for name, parts in moments.items() for key, v in parts.items()}


def versions() -> dict[str, str]:
    """Versions of calm, Python and PyTorch, and the git commit if known."""
    result = {"calm": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if (commit := _commit()) is not None:
        result["commit"] = commit
    return result


def _commit() -> str | None:
    """The git commit of the source tree, or None if this file is not tracked by git."""
    file = Path(__file__)
    git = ["git", "-C", str(file.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", file.name], capture_output=True, check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()


class Checkpoints:
    """The checkpoints of one run. Keeps the most recent ones and the best."""

    def __init__(self, directory: Path, keep: int, world: World, record: dict[str, Any], warn):
        self.directory, self.keep, self.world, self.warn = directory, keep, world, warn
        self.record = {"versions": versions(), **record}
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future | None = None
        if world.is_main:
            directory.mkdir(parents=True, exist_ok=True)
            for suffix in (UNFINISHED, DELETED):
                for path in directory.glob(f"*{suffix}"):
                    shutil.rmtree(path)

    def save(
        self, step: int, state: dict[str, Tensor], *, score: float | None = None, skipped: Sequence[int] = (0, 0)
    ) -> None:
        """Start saving a checkpoint. The state is copied immediately and written in the background.

        The copy is in CPU memory: the writing thread has its own current CUDA device and stream, so it must not touch
        tensors of a GPU.

        Args:
            score: the best checkpoint is the one with the largest.
            skipped: steps that were skipped, in all and in a row.
        """
        self.wait()
        copy = {name: value.detach().to("cpu", copy=True) for name, value in state.items()}
        extra = {"score": score, "skipped": list(skipped)}
        self._pending = self._thread.submit(self._write, step, copy, extra)

    def wait(self) -> bool:
        """Wait for the pending checkpoint. Returns False if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        error = pending.result()
        failed = self.world.any(error is not None)
        if failed and self.world.is_main:
            self.warn(f"a checkpoint could not be written ({error or 'in another process'}); earlier ones are kept")
        return not failed

    def _write(self, step: int, state: dict[str, Tensor], extra: dict[str, Any]) -> str | None:
        final = self.directory / f"step-{step:08d}"
        temporary = final.with_name(final.name + UNFINISHED)
        try:
            _save(state, temporary, self.world)
            checksums = self._checksums(temporary)
            if not self.world.is_main:
                return None
            record = {
                "step": step,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "files": checksums,
                **extra,
                **self.record,
            }
            write_json(temporary / RECORD, {**record, "sha256": _digest(record)})
            if final.exists():
                _remove(final)
            temporary.rename(final)
            sync(self.directory)
            self._prune()
        except (Exception, CheckpointException) as error:  # a full disk raises many kinds, and must not stop training
            if self.world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            return f"step {step}: {_cause(error)}"
        return None

    def _checksums(self, directory: Path) -> dict[str, str]:
        """SHA-256 of all files, each computed by the process that has written it, after it is on the disk."""
        own: dict[str, str] | OSError = {}
        try:
            for path in directory.glob(f"shard-{self.world.rank + 1:05d}-*"):
                sync(path)
                own[path.name] = sha256_of(path)
        except OSError as error:  # the other processes must not wait for this one
            own = error
        parts: list[Any] = [own]
        if self.world.size > 1:
            parts = [None] * self.world.size
            dist.all_gather_object(parts, own, group=self.world.saving)
        for part in parts:
            if isinstance(part, OSError):
                raise part
        return dict(sorted(pair for part in parts for pair in part.items()))

    def _prune(self) -> None:
        """Delete all checkpoints except the most recent ones and the best."""
        paths = self.paths()
        best = max(paths, key=lambda path: (self._score(path), path.name))
        for path in paths[: -self.keep]:
            if path != best:
                _remove(path)

    def _score(self, path: Path) -> float:
        try:
            score = json.loads((path / RECORD).read_bytes()).get("score")
        except (OSError, ValueError, AttributeError):  # damaged: `newest` reports it
            score = None
        return score if isinstance(score, int | float) else float("-inf")

    def paths(self) -> list[Path]:
        """Checkpoint directories in order of their steps."""
        return checkpoint_paths(self.directory)

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the path and record of the newest valid checkpoint. Damaged ones are reported and renamed."""
        found = newest = None
        for path in reversed(self.paths()) if self.world.is_main else []:
            found = path
            if problem := damage(path):
                self.warn(f"checkpoint {path} is damaged ({problem}); trying the previous one")
                path.rename(_unused(path.with_name(path.name + DAMAGED)))
                continue
            newest = path, json.loads((path / RECORD).read_bytes())
            break
        found, newest = self.world.broadcast((found, newest))
        if found and not newest:
            raise UserError(
                f"all checkpoints in {self.directory} are damaged, and are now named *{DAMAGED}; restore one of them, "
                "or run again with --resume to start from step 0"
            )
        return newest

    def close(self) -> None:
        """Wait for the pending write, without collectives: other processes may have exited."""
        if self._pending is not None:
            self._pending.result()
        self._thread.shutdown()


def _remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill leaves no half of it under its name."""
    aside = path.with_name(path.name + DELETED)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside)


def _unused(path: Path) -> Path:
    """This path, or one with a number, that does not exist."""
    return next(p for n in count(1) if not (p := path if n == 1 else path.with_name(f"{path.name}-{n}")).exists())


def _cause(error: BaseException) -> str:
    """One line about an error; torch's `CheckpointException` wraps those of each process."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (str(error) or repr(error)).splitlines()[0]


def _file_numbers(state: dict[str, Tensor]) -> dict[str, int]:
    """Assign each tensor to a file, numbered from 1, by the bytes that a process holds of it.

    Small files save memory: the writer keeps two copies of a file.
    """
    numbers, number, file_size = {}, 1, 0
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value  # a DTensor counts those of all processes
        size = local.numel() * local.element_size()
        if file_size and file_size + size > LARGEST_FILE:
            number, file_size = number + 1, 0
        numbers[name], file_size = number, file_size + size
    return numbers


def checkpoint_paths(directory: Path) -> list[Path]:
    """The checkpoints of a run, in order of their steps."""
    return sorted(directory.glob(f"step-{'[0-9]' * 8}"))


def step_of(path: Path) -> int:
    """The step of a checkpoint, from the name of its directory."""
    return int(path.name.removeprefix("step-"))


def older_version(directory: Path) -> str | None:
    """The version that wrote the checkpoints of a run, if this version cannot resume them."""
    for path in checkpoint_paths(directory):
        try:
            version = str(json.loads((path / RECORD).read_bytes())["versions"]["calm"])
            if tuple(map(int, version.split(".")[:2])) < OLDEST_RESUMABLE:
                return version
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # damaged: `newest` reports it
    return None


def damage(path: Path) -> str | None:
    """Verify a checkpoint. Returns a description of the damage, or None if it is valid."""
    try:
        record = json.loads((path / RECORD).read_bytes())
        if problem := _record_problem(record, path):
            return f"{RECORD}: {problem}"
        for name, checksum in record["files"].items():
            if not (path / name).exists():
                return f"{name} is missing"
            if sha256_of(path / name) != checksum:
                return f"checksum mismatch in {name}"
        # Every such file would be loaded.
        unlisted = sorted({file.name for file in path.iterdir() if file.suffix == ".safetensors"} - {*record["files"]})
    except (OSError, ValueError, RecursionError) as error:
        return one_line(error)
    return f"{unlisted[0]} is not listed in {RECORD}" if unlisted else None


def _record_problem(record: Any, path: Path) -> str | None:
    """What is wrong with the record of a checkpoint, or None."""
    if not isinstance(record, dict):
        return "not an object"
    if "sha256" in record and record["sha256"] != _digest(record):  # those of early 0.2.0.dev0 have none
        return "checksum mismatch"
    if type(record.get("step")) is not int or record["step"] != step_of(path):
        return f"its step is {record.get('step')!r:.40}"
    files, skipped = record.get("files"), record.get("skipped")
    if not isinstance(files, dict) or not all(isinstance(checksum, str) for checksum in files.values()):
        return "it lists no files"
    if not (isinstance(skipped, list) and [type(number) for number in skipped] == [int, int]):
        return f"its skipped steps are {skipped!r:.40}"
    return None


def _digest(record: dict[str, Any]) -> str:
    """SHA-256 of a record, without its own checksum."""
    content = {name: value for name, value in record.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load(path: Path, state: dict[str, Tensor], world: World) -> None:
    """Load a checkpoint into the tensors of `state`, in place."""
    reader = HuggingFaceStorageReader(str(path))
    try:
        load_state(cast(Any, state), storage_reader=reader, process_group=world.saving, no_dist=world.size == 1)
    except (Exception, CheckpointException) as error:  # its tensors are not those of the model
        raise UserError(
            f"checkpoint {path} does not fit the model ({_cause(error)}); move it away and run again with --resume"
        ) from error


def _save(state: dict[str, Tensor], path: Path, world: World) -> None:
    writer = HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=_file_numbers(state), save_distributed=True)
    writer.per_thread_copy_ahead = 0  # the state is in CPU memory: no CUDA stream to copy on
    save_state(cast(Any, state), storage_writer=writer, process_group=world.saving, no_dist=world.size == 1)
    if world.size > 1:
        dist.barrier(group=world.saving)
