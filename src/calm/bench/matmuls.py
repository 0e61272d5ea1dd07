"""The matrix products of a computation, alone: what is left of its time if everything else cost nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from calm.products import ONE_DNN

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", ONE_DNN.__name__}
COPIES = 8  # of a matrix: a model has others at every call, and they do not all lie in a cache


Call = tuple[Any, list[Any]]  # a function, and the layout of what it was given


class _Products(TorchDispatchMode):
    """Notes the matrix products of what happens inside of it: the function, and the layout of what it was given."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Call, Call]] = []  # each as it is computed, and as torch would

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__.split(".")[0] in PRODUCTS:
            own = function, [_layout(value) for value in args]
            self.calls.append((own, _by_torch(*args) if function is ONE_DNN.default else own))
        return function(*args, **(kwargs or {}))


def _by_torch(rows: Tensor, matrix: Tensor, bias: Tensor | None, *_: Any) -> Call:
    """oneDNN's product of rows and a matrix, as torch would compute it."""
    given = [_layout(rows.reshape(-1, rows.shape[-1])), _layout(matrix.T)]
    return (torch.ops.aten.mm, given) if bias is None else (torch.ops.aten.addmm, [_layout(bias), *given])


def _layout(value: Any) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


class Products:
    """The products of one run of a function, to be computed again on other numbers, by torch's own way or by ours."""

    def __init__(self, function: Callable[[], object], by_torch: bool = True):
        with _Products() as found:
            function()
        made: dict[Any, Tensor] = {}
        self.calls = [
            (product, [_made(value, number % COPIES, made) for value in given])
            for number, (product, given) in enumerate(call[by_torch] for call in found.calls)
        ]

    @property
    def flops(self) -> float:
        """Each row of the first factor meets each column of the second."""
        total = 0.0
        for product, given in self.calls:
            factors = [value for value in given if isinstance(value, Tensor)]
            if product is ONE_DNN.default:
                total += 2.0 * factors[0].numel() * len(factors[1])
            else:
                total += 2.0 * factors[-2].numel() * factors[-1].shape[-1]
        return total

    @torch.no_grad()
    def run(self) -> None:
        for product, given in self.calls:
            product(*given)


def _made(layout: Any, copy: int, made: dict[Any, Tensor]) -> Any:
    if not (isinstance(layout, tuple) and len(layout) == 3):
        return layout
    if (layout, copy) not in made:
        shape, stride, dtype = layout
        made[layout, copy] = torch.empty_strided(shape, stride, dtype=dtype).normal_()
    return made[layout, copy]
