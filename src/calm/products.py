"""Matrix products with few rows on CPUs: what a step of generation spends its time on.

A text that grows has one row, a small batch a few. For these the libraries' product reads the matrix on one core, at
less than half of what memory gives, and two rows take twice the time of one. Cut into slices it is a batch of products,
which are shared among the cores. docs/performance.md has the numbers.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from calm.allocator import on_huge_pages

SLICES = 16
FEW, MANY = 4, 64  # rows: for which smaller matrices gain, too, and beyond which nothing is gained
SMALL, SMALL_FOR_SOME = 2**17, 2**19  # numbers of a matrix that gains nothing, for few rows and for more


class FewRows:
    """Few rows times one matrix (m, d), which may change but not move: rows (n, d) → rows @ matrix.T."""

    def __init__(self, matrix: Tensor):
        self.matrix, self.place, (count, size) = matrix, matrix.data_ptr(), matrix.shape
        self.slices = gcd(count, SLICES)
        self.most = 0  # rows for which slices gain
        fast = matrix.dtype.itemsize >= torch.float32.itemsize  # for smaller numbers batches of products are not
        here = matrix.device.type == "cpu" and matrix.is_contiguous()
        if here and fast and self.slices > 1 and matrix.numel() >= SMALL:
            self.most = MANY if matrix.numel() >= SMALL_FOR_SOME else FEW
            each = count // self.slices
            self.parts = matrix.as_strided((self.slices, size, each), (each * size, 1, size))

    def __call__(self, rows: Tensor) -> Tensor:
        count = len(rows)
        if count > self.most:
            return rows @ self.matrix.T
        found = torch.bmm(rows.expand(self.slices, -1, -1), self.parts)  # (slices, n, m / slices)
        return found.view(1, -1) if count == 1 else found.transpose(0, 1).reshape(count, -1)


def long_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """The same for a long matrix, like that of all words: it is faster as the first factor."""
    count, size = rows.shape
    if count > MANY or rows.device.type != "cpu":
        return rows @ matrix.T
    slices = gcd(len(matrix), SLICES)
    if slices > 1:
        parts = matrix.view(slices, -1, size)
        return torch.bmm(parts, rows.T.expand(slices, size, count)).flatten(0, 1).T
    if count == 1:  # twice the same row is faster than a matrix times a vector
        return (matrix @ rows.expand(2, size).contiguous().T).T[:1]
    return (matrix @ rows.T).T


class FewRowsLinear(nn.Linear):
    """A linear layer that is not slow for few rows."""

    product: FewRows | None = None  # with the weights where they lie now

    def forward(self, input: Tensor) -> Tensor:
        few = 0 < input.numel() <= MANY * self.in_features
        if not few or torch.is_grad_enabled() or input.device.type != "cpu" or input.dtype != torch.float32:
            return super().forward(input)
        rows = input if input.ndim == 2 else input.reshape(-1, self.in_features)
        if self.product is None or self.product.place != self.weight.data_ptr():
            self.product = FewRows(self.weight)
        found = self.product(rows)
        found = found if self.bias is None else found.add_(self.bias)
        return found if input.ndim == 2 else found.view(*input.shape[:-1], self.out_features)


def prepare_for_few_rows(model: nn.Module, kind: type[nn.Linear] = FewRowsLinear) -> None:
    """Let the linear layers of a model be of this kind; their weights stay, and so does what training computes."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module) in (nn.Linear, FewRowsLinear):
            module.__class__ = kind
            if kind is FewRowsLinear and not module.weight.is_inference():
                module.weight.data = on_huge_pages(module.weight.data)


def side_by_side(layers: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """Linear layers of the same rows as one product: (n, d) → (n, all that they give). For inference.

    Their weights come to lie one behind the other, in memory that is one matrix, and stay the layers' own. Layers of
    other kinds, or with a bias, are called one by one.
    """
    weights = [layer.weight for layer in layers if type(layer) in (nn.Linear, FewRowsLinear) and layer.bias is None]
    if len(weights) < len(layers) or any(weight.is_inference() for weight in weights):
        return lambda rows: torch.cat([layer(rows) for layer in layers], dim=-1)
    return FewRows(_one_behind_the_other(weights))


@torch.no_grad()
def _one_behind_the_other(weights: list[Tensor]) -> Tensor:
    """Matrices (m, d), (n, d) … as one (m + n + …, d). Where they do not lie so yet, they are moved."""
    first, lengths = weights[0].detach(), [len(weight) for weight in weights]
    if len(weights) > 1 and _lie_so(weights):
        return first.as_strided((sum(lengths), first.shape[1]), first.stride())
    matrix = on_huge_pages(torch.cat(weights) if len(weights) > 1 else first)
    for weight, part in zip(weights, matrix.split(lengths), strict=True):
        weight.data = part
    return matrix


def _lie_so(weights: list[Tensor]) -> bool:
    place, memory = weights[0].data_ptr(), weights[0].untyped_storage().data_ptr()
    for weight in weights:
        if weight.data_ptr() != place or weight.untyped_storage().data_ptr() != memory or not weight.is_contiguous():
            return False
        place += weight.nbytes
    return True
