"""The process group: one process by default, many under torchrun."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


_current: list[World] = []  # the process group that has been initialised, if any


@contextmanager
def process_group() -> Iterator[World]:
    """Initialise the process group that torchrun describes; nested calls share it."""
    if _current:
        yield _current[0]
        return
    cuda = torch.cuda.is_available()
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if size == 1:
        yield World(0, 1, device)
        return
    dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
    try:
        groups = (dist.new_group(backend="gloo", timeout=timedelta(hours=1)) for _ in ("control", "saving"))
        _current.append(World(rank, size, device, *groups))
        yield _current[0]
    finally:
        _current.clear()
        dist.destroy_process_group()


def default_device() -> str:
    """The device of a single process."""
    return "cuda" if torch.cuda.is_available() else "cpu"
