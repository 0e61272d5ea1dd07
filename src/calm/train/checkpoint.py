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
from calm.files import sha256_of, sync, write_json
from calm.train.distributed import Processes

RECORD = "checkpoint.json"
UNFINISHED = ".writing"


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer moments under one flat set of names; the tensors are those in use."""
    state: dict[str, Any] = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    moments: Any = get_optimizer_state_dict(model, optimizer)["state"]
    return state | {f"optimizer.{name}.{key}": v for name, parts in moments.items() for key, v in parts.items()}


def initialise_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make the moments exist without moving a parameter, so that there is something to load into."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def versions() -> dict[str, str]:
    """What a result depends on beside its configuration."""
    found = {"calm": __version__, "python": platform.python_version(), "torch": torch.__version__}
    here = Path(__file__).parent
    commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if commit.returncode == 0:
        found["commit"] = commit.stdout.strip()
    return found


class Checkpoints:
    """The checkpoints of one run: the last few, and the best."""

    def __init__(self, directory: Path, keep: int, among: Processes, record: dict[str, Any], warn):
        self.directory, self.keep, self.among, self.record, self.warn = directory, keep, among, record, warn
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future | None = None
        if among.is_first:
            directory.mkdir(parents=True, exist_ok=True)
            for left in directory.glob(f"*{UNFINISHED}"):
                shutil.rmtree(left)

    def save(self, step: int, state: dict[str, Tensor], score: float | None) -> None:
        """Begin to write a checkpoint. The copy is made now; writing goes on in the background."""
        self.wait()
        copy = {name: value.detach().clone() for name, value in state.items()}
        self._pending = self._thread.submit(self._write, step, copy, score)

    def wait(self) -> bool:
        """Wait for the checkpoint under way; false if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        problem = self.among.any(error is not None) if (error := pending.result()) or self.among.size > 1 else False
        if problem and self.among.is_first:
            self.warn(f"a checkpoint could not be written ({error or 'in another process'}); earlier ones are kept")
        return not problem

    def _write(self, step: int, state: dict[str, Tensor], score: float | None) -> str | None:
        final = self.directory / f"step-{step:08d}"
        aside = final.with_name(final.name + UNFINISHED)
        try:
            _save(state, aside, self.among)
            if not self.among.is_first:
                return None
            files = sorted(path.name for path in aside.iterdir())
            record = {
                "step": step,
                "score": score,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "files": {name: sha256_of(aside / name) for name in files},
                "versions": versions(),
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
            if self.among.is_first:
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
        return sorted(p for p in self.directory.glob("step-*") if p.suffix != UNFINISHED and (p / RECORD).exists())

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint; damaged ones are named and passed over."""
        chosen = None
        for path in reversed(self.found()) if self.among.is_first else []:
            if problem := damage(path):
                self.warn(f"checkpoint {path} is damaged ({problem}); trying the one before it")
                continue
            chosen = path, json.loads((path / RECORD).read_bytes())
            break
        return self.among.share(chosen)

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()


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


def load(path: Path, state: dict[str, Tensor], among: Processes) -> None:
    """Fill the tensors of `state` from a checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is one process
        load_state(
            cast(dict[str, Any], state),
            storage_reader=HuggingFaceStorageReader(str(path)),
            process_group=among.saving,
            no_dist=among.size == 1,
        )


def _save(state: dict[str, Tensor], path: Path, among: Processes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_state(
            cast(dict[str, Any], state),
            storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True),
            process_group=among.saving,
            no_dist=among.size == 1,
        )
    if among.size > 1:
        dist.barrier(group=among.saving)
