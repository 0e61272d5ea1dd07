"""Processes: one without any wrapper, many with FSDP2 under torchrun.

Under `fully_shard` only `forward` gathers a module's parameters, so training enters a model through it; other methods
that are used on a sharded model are registered. A model says with `sharded_parts` which of its modules are groups of
their own; what is left, a tied embedding above all, stays together in the root's group.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from calm.models.backbone import transformer_layers


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

    def share(self, value: Any) -> Any:
        """What the first process says, to all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]


@contextmanager
def processes() -> Iterator[Processes]:
    """Join the others that torchrun has started, if it has."""
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
        yield Processes(rank, size, device, *groups)
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module, among: Processes) -> None:
    """Spread parameters, gradients and optimizer state over the processes; a single process is left as it is."""
    if among.size == 1:
        return
    parts = model.sharded_parts() if hasattr(model, "sharded_parts") else transformer_layers(model)  # pyright: ignore
    for part in (*parts, model):
        fully_shard(part)
        for method in getattr(part, "entered_by", ()):
            register_fsdp_forward_method(part, method)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered; others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore
