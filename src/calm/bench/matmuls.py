"""Records the matmuls of a computation and replays them alone, to measure the time spent outside of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

ONEDNN = "mkldnn::_linear_pointwise"  # what the CPU backend uses in training
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
COPIES = 8  # of each operand, so that replayed matmuls do not always hit the cache


class _Recorder(TorchDispatchMode):
    """Records each matmul executed in its context: the operator and the layouts of its arguments."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.name() == ONEDNN:
            rows, matrix, bias, *_ = args
            self.calls.append((function, [_layout(value) for value in (rows.flatten(0, -2), matrix, bias)]))
        elif function.__name__.split(".")[0] in PRODUCTS:
            self.calls.append((function, [_layout(value) for value in args]))
        return function(*args, **(kwargs or {}))


def _layout(value: Any) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


class Products:
    """The matmuls of one call of a function, replayed on random data with the kernels of torch or of this package."""

    def __init__(self, function: Callable[[], object]):
        with _Recorder() as recorder:
            function()
        tensors: dict[Any, Tensor] = {}
        self.calls = [
            (operator, [_allocate(value, number % COPIES, tensors) for value in args])
            for number, (operator, args) in enumerate(recorder.calls)
        ]

    @property
    def flops(self) -> float:
        """FLOPs of all recorded matmuls, two per multiply-add."""
        total = 0.0
        for operator, args in self.calls:
            factors = [value for value in args if isinstance(value, Tensor)]
            if operator.name() == ONEDNN:
                total += 2.0 * factors[0].numel() * len(factors[1])
            else:
                total += 2.0 * factors[-2].numel() * factors[-1].shape[-1]
        return total

    @torch.no_grad()
    def run(self) -> None:
        """Replay with torch's default kernels."""
        for operator, args in self.calls:
            F.linear(*args) if operator.name() == ONEDNN else operator(*args)

    @torch.no_grad()
    def run_own(self) -> None:
        """Replay with the kernels that were recorded."""
        for operator, args in self.calls:
            operator(*args, "none", [], "") if operator.name() == ONEDNN else operator(*args)


def _allocate(layout: Any, copy: int, tensors: dict[Any, Tensor]) -> Any:
    if not (isinstance(layout, tuple) and len(layout) == 3):
        return layout
    if (layout, copy) not in tensors:
        shape, stride, dtype = layout
        tensors[layout, copy] = torch.empty_strided(shape, stride, dtype=dtype).normal_()
    return tensors[layout, copy]
