"""Checkpoints: written aside while training goes on, synced, renamed; checked when read.

    RUN/checkpoints/step-00001000/
      shard-*.safetensors    parameters and optimizer state, by torch.distributed.checkpoint: any number of processes
                             reads what any number has written
      checkpoint.json        step, score, configuration, versions, SHA-256 of the shards; written last

All randomness of a run follows from its seed, the step and the row, so these are the states of its generators, too.
"""

import json
import platform
import shutil
import subprocess
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from calm import __version__
from calm.distributed import World
from calm.files import sha256_of, sync, write_json

RECORD = "checkpoint.json"
UNFINISHED, DAMAGED = ".writing", ".damaged"
LARGEST_FILE = 2**28  # bytes, unless a single tensor is larger

# One process is one process: torch need not tell us so at every checkpoint.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer moments under one flat set of names; the tensors are those in use."""
    state: dict[str, Any] = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    moments: Any = get_optimizer_state_dict(model, optimizer)["state"]
    return state | {f"optimizer.{name}.{key}": v for name, parts in moments.items() for key, v in parts.items()}


def versions() -> dict[str, str]:
    """What a result depends on beside its configuration."""
    found = {"calm": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if (commit := _commit()) is not None:
        found["commit"] = commit
    return found


def _commit() -> str | None:
    """The commit of this file, if it is kept in git at all."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True)
        done = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


class Checkpoints:
    """The checkpoints of one run: the last few, and the best."""

    def __init__(self, directory: Path, keep: int, world: World, record: dict[str, Any], warn):
        self.directory, self.keep, self.world, self.warn = directory, keep, world, warn
        self.record = {"versions": versions(), **record}
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future | None = None
        if world.is_main:
            directory.mkdir(parents=True, exist_ok=True)
            for left in directory.glob(f"*{UNFINISHED}"):
                shutil.rmtree(left)

    def save(self, step: int, state: dict[str, Tensor], **extra: Any) -> None:
        """Begin to write a checkpoint. The copy is made now; writing goes on in the background.

        `extra` is kept in its record; the best checkpoint is that with the largest `score`.
        """
        self.wait()
        copy = {name: value.detach().clone() for name, value in state.items()}
        self._pending = self._thread.submit(self._write, step, copy, extra)

    def wait(self) -> bool:
        """Wait for the checkpoint under way; false if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        error = pending.result()
        problem = self.world.any(error is not None)
        if problem and self.world.is_main:
            self.warn(f"a checkpoint could not be written ({error or 'in another process'}); earlier ones are kept")
        return not problem

    def _write(self, step: int, state: dict[str, Tensor], extra: dict[str, Any]) -> str | None:
        final = self.directory / f"step-{step:08d}"
        aside = final.with_name(final.name + UNFINISHED)
        try:
            _save(state, aside, self.world)
            if not self.world.is_main:
                return None
            files = sorted(path.name for path in aside.iterdir())
            record = {
                "step": step,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "files": {name: sha256_of(aside / name) for name in files},
                **extra,
                **self.record,
            }
            write_json(aside / RECORD, record)
            for name in files:
                sync(aside / name)
            if final.exists():
                shutil.rmtree(final)
            aside.rename(final)
            sync(self.directory)
            self._prune()
        except Exception as error:  # a full disk comes as one of many kinds, and must not end the training
            if self.world.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            return f"step {step}: {str(error) or repr(error)}".splitlines()[0]
        return None

    def _prune(self) -> None:
        """Remove all but the last few and the best."""
        found = self.found()
        best = max(found, key=lambda path: (self._score(path), path.name))
        for path in found[: -self.keep]:
            if path != best:
                shutil.rmtree(path)

    def _score(self, path: Path) -> float:
        score = json.loads((path / RECORD).read_bytes()).get("score")
        return float("-inf") if score is None else score

    def found(self) -> list[Path]:
        """Checkpoints in the order of their steps."""
        return sorted(self.directory.glob("step-????????"))

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint; damaged ones are named and put aside."""
        chosen = None
        for path in reversed(self.found()) if self.world.is_main else []:
            if problem := damage(path):
                self.warn(f"checkpoint {path} is damaged ({problem}); trying the one before it")
                path.rename(path.with_name(path.name + DAMAGED))
                continue
            chosen = path, json.loads((path / RECORD).read_bytes())
            break
        return self.world.broadcast(chosen)

    def close(self) -> None:
        """Let the writing end; nothing is asked of the other processes, which may be elsewhere, or gone."""
        if self._pending is not None:
            self._pending.result()
        self._thread.shutdown()


def _files(state: dict[str, Tensor]) -> dict[str, int]:
    """The number of the file that each tensor goes into, from 1: the writer holds a file twice while it makes it."""
    numbers, number, held = {}, 1, 0
    for name, value in state.items():
        size = value.numel() * value.element_size()
        if held and held + size > LARGEST_FILE:
            number, held = number + 1, 0
        numbers[name], held = number, held + size
    return numbers


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files = json.loads((path / RECORD).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{RECORD}: {error}"
    for name, checksum in files.items():
        if not (path / name).exists():
            return f"{name} is missing"
        if sha256_of(path / name) != checksum:
            return f"the checksum of {name} differs"
    return None


def load(path: Path, state: dict[str, Tensor], world: World) -> None:
    """Fill the tensors of `state` from a checkpoint."""
    reader = HuggingFaceStorageReader(str(path))
    load_state(cast(Any, state), storage_reader=reader, process_group=world.saving, no_dist=world.size == 1)


def _save(state: dict[str, Tensor], path: Path, world: World) -> None:
    writer = HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=_files(state), save_distributed=True)
    save_state(cast(Any, state), storage_writer=writer, process_group=world.saving, no_dist=world.size == 1)
    if world.size > 1:
        dist.barrier(group=world.saving)
