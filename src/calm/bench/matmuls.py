"""The matrix products of a computation, alone: what is left of its time if everything else cost nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from calm.products import ONE_DNN

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
COPIES = 8  # of a matrix: a model has others at every call, and they do not all lie in a cache


class _Products(TorchDispatchMode):
    """Notes the matrix products of what happens inside of it: the function, and the layout of what it was given."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is ONE_DNN.default:
            rows, matrix, bias, *_ = args
            self.calls.append((ONE_DNN, [_layout(value) for value in (rows.flatten(0, -2), matrix, bias)]))
        elif function.__name__.split(".")[0] in PRODUCTS:
            self.calls.append((function, [_layout(value) for value in args]))
        return function(*args, **(kwargs or {}))


def _layout(value: Any) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


class Products:
    """The products of one run of a function, to be computed again on other numbers, by torch's own way or by ours."""

    def __init__(self, function: Callable[[], object]):
        with _Products() as found:
            function()
        made: dict[Any, Tensor] = {}
        self.calls = [
            (product, [_made(value, number % COPIES, made) for value in given])
            for number, (product, given) in enumerate(found.calls)
        ]

    @property
    def flops(self) -> float:
        """Each row of the first factor meets each column of the second."""
        total = 0.0
        for product, given in self.calls:
            factors = [value for value in given if isinstance(value, Tensor)]
            if product is ONE_DNN:
                total += 2.0 * factors[0].numel() * len(factors[1])
            else:
                total += 2.0 * factors[-2].numel() * factors[-1].shape[-1]
        return total

    @torch.no_grad()
    def run(self) -> None:
        for product, given in self.calls:
            F.linear(*given) if product is ONE_DNN else product(*given)

    @torch.no_grad()
    def run_own(self) -> None:
        for product, given in self.calls:
            ONE_DNN(*given, "none", [], "") if product is ONE_DNN else product(*given)


def _made(layout: Any, copy: int, made: dict[Any, Tensor]) -> Any:
    if not (isinstance(layout, tuple) and len(layout) == 3):
        return layout
    if (layout, copy) not in made:
        shape, stride, dtype = layout
        made[layout, copy] = torch.empty_strided(shape, stride, dtype=dtype).normal_()
    return made[layout, copy]
