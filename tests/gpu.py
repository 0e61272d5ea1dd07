"""A simulated GPU: tensors on the meta device, which compute nothing, and a count of the kernels they would launch.

Whatever a program would have to wait for a GPU to do, such as `.item()`, `bool(tensor)`, or a selection by a mask,
raises an error, and so does a mix of CPU and GPU tensors in one operation.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("meta")
VIEWS = {"view", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "select", "split", "unbind", "detach"}
FREE = VIEWS | {"alias", "unsqueeze", "squeeze", "empty", "empty_like", "as_strided", "unfold"}


class CountKernels(TorchDispatchMode):
    """Counts operations that launch a kernel; views and allocations launch none."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.kernels.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def simulated_gpu() -> Iterator[CountKernels]:
    """Count kernels. Autocast, which does not know the meta device, is off."""
    with (
        patch("torch.autocast", lambda device, *_, **options: nullcontext()),
        patch("torch.is_autocast_enabled", lambda device=None: False),
        CountKernels() as kernels,
    ):
        yield kernels
