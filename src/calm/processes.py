"""This process among those that torchrun has started, if it has."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from calm.allocator import keep_memory


@dataclass(frozen=True)
class Processes:
    """This process among all."""

    rank: int
    size: int
    device: torch.device
    control: Any = None  # the group that numbers and decisions go through
    saving: Any = None  # that of checkpoints, which are written while training goes on

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sum numbers over all processes."""
        return self.add_up(torch.tensor(values, dtype=torch.float64)).tolist()

    def add_up(self, sums: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(sums, group=self.control)
        return sums

    def any(self, value: bool) -> bool:
        return value if self.size == 1 else self.sum(value)[0] > 0

    def gather(self, value: Any) -> list[Any]:
        """What every process says, to all."""
        if self.size == 1:
            return [value]
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.control)
        return said

    def share(self, value: Any) -> Any:
        """What the first process says, to all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]


_joined: list[Processes] = []  # while this process is among others


@contextmanager
def processes() -> Iterator[Processes]:
    """Join the others that torchrun has started, if it has; who has joined already stays with them."""
    if _joined:
        yield _joined[0]
        return
    keep_memory()
    cuda = torch.cuda.is_available()
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if size == 1:
        yield Processes(0, 1, device)
        return
    dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
    try:
        groups = (dist.new_group(backend="gloo", timeout=timedelta(hours=1)) for _ in ("control", "saving"))
        _joined.append(Processes(rank, size, device, *groups))
        yield _joined[0]
    finally:
        _joined.clear()
        dist.destroy_process_group()


def default_device() -> str:
    """Of a single process."""
    return "cuda" if torch.cuda.is_available() else "cpu"
