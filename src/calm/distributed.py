"""Devices, dtypes, and the process group: one process by default, many under torchrun."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from calm.errors import ConfigError


@dataclass(frozen=True)
class World:
    """This process's place in the process group, and the collectives that the package uses.

    All collectives are no-ops in a single process.
    """

    rank: int
    size: int
    device: torch.device
    control: Any = None  # gloo group for metrics and decisions
    saving: Any = None  # gloo group for checkpoints, which are written while training goes on

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sum numbers over all processes."""
        return self.all_reduce(torch.tensor(values, dtype=torch.float64)).tolist()

    def all_reduce(self, sums: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place; one on a GPU without waiting for it."""
        if self.size > 1:
            dist.all_reduce(sums, group=self.control if sums.device.type == "cpu" else None)
        return sums

    def any(self, value: bool) -> bool:
        """Whether the value is true on any process."""
        return value if self.size == 1 else self.sum(value)[0] > 0

    def all_gather(self, value: Any) -> list[Any]:
        """The objects of all processes, on every process."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def broadcast(self, value: Any) -> Any:
        """The main process's object, on every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]


_current: list[World] = []  # the process group that has been initialized, if any


@contextmanager
def process_group(device: str = "auto") -> Iterator[World]:
    """Initialize the process group that torchrun describes; nested calls share it."""
    if _current:
        yield _current[0]
        return
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = resolve_device(device)
    if cuda := chosen.type == "cuda":
        chosen = resolve_device(f"cuda:{os.environ.get('LOCAL_RANK', chosen.index or 0)}")
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(0, 1, chosen)
        return
    dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
    try:
        groups = (dist.new_group(backend="gloo", timeout=timedelta(hours=1)) for _ in ("control", "saving"))
        _current.append(World(rank, size, chosen, *groups))
        yield _current[0]
    finally:
        _current.clear()
        dist.destroy_process_group()


def resolve_device(name: str = "auto") -> torch.device:
    """The device that a user named: auto (a GPU if there is one), cpu, cuda, or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f"device must be auto, cpu, cuda, or cuda:N, not {name!r}")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {name} is not available: torch {torch.__version__} finds no CUDA device; use cpu")
    device = torch.device("cuda", 0) if name == "auto" else torch.device(name)
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} is not available: this machine has {torch.cuda.device_count()} CUDA devices, numbered from "
            "0; with torchrun, lower --nproc-per-node"
        )
    torch.set_float32_matmul_precision("high")  # TF32 for what remains in fp32
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of weights in inference: auto is bf16 on a GPU that supports it, and fp32 elsewhere."""
    if name not in ("auto", "fp32", "bf16"):
        raise ConfigError(f"dtype must be auto, fp32, or bf16, not {name!r}")
    if name == "auto":
        name = "bf16" if device.type == "cuda" and _has_bf16(device) else "fp32"
    return torch.bfloat16 if name == "bf16" else torch.float32


def _has_bf16(device: torch.device) -> bool:
    """Whether a GPU computes in bf16, and does not only emulate it."""
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def move_model(model: Any, device: torch.device, dtype: str) -> Any:
    """Convert a model's parameters to the dtype that a user named, and move it to a device.

    Buffers, such as the rotary frequencies of transformers' models, keep their precision.
    """
    chosen = resolve_dtype(dtype, device)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(chosen)
    return model.to(device)
