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

SLICES = 16
FEW, MANY = 4, 64  # rows: for which smaller matrices gain, too, and beyond which nothing is gained
SMALL, SMALL_FOR_SOME = 2**17, 2**19  # numbers of a matrix that gains nothing, for few rows and for more


def few_rows_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows @ matrix.T: (n, d), (m, d) → (n, m)."""
    count, size = rows.shape
    small = SMALL if count <= FEW else SMALL_FOR_SOME
    slices = gcd(len(matrix), SLICES)
    large = rows.dtype.itemsize >= torch.float32.itemsize  # for smaller numbers there is no fast batch of products
    if count > MANY or matrix.numel() < small or slices == 1 or rows.device.type != "cpu" or not large:
        return rows @ matrix.T
    parts = matrix.view(slices, -1, size)
    found = torch.bmm(rows.expand(slices, count, size), parts.transpose(1, 2))  # (slices, n, m / slices)
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

    def forward(self, input: Tensor) -> Tensor:
        few = 0 < input.numel() <= MANY * self.in_features
        if not few or torch.is_grad_enabled() or input.device.type != "cpu" or input.dtype != torch.float32:
            return super().forward(input)
        found = few_rows_product(input.reshape(-1, self.in_features), self.weight)
        found = found if self.bias is None else found.add_(self.bias)
        return found.view(*input.shape[:-1], self.out_features)


def prepare_for_few_rows(model: nn.Module, kind: type[nn.Linear] = FewRowsLinear) -> None:
    """Let the linear layers of a model be of this kind; their weights stay, and so does what training computes."""
    for module in model.modules():
        if type(module) in (nn.Linear, FewRowsLinear):
            module.__class__ = kind


def side_by_side(layers: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """Linear layers of the same rows as one product: (n, d) → (n, all that they give). For inference.

    Their weights come to lie one behind the other, in memory that is one matrix, and stay the layers' own. Layers of
    other kinds, or with a bias, are called one by one.
    """
    weights = [layer.weight for layer in layers if type(layer) in (nn.Linear, FewRowsLinear) and layer.bias is None]
    if len(weights) < len(layers) or any(weight.is_inference() for weight in weights):
        return lambda rows: torch.cat([layer(rows) for layer in layers], dim=-1)
    matrix = _one_behind_the_other(weights)
    return lambda rows: few_rows_product(rows, matrix)


@torch.no_grad()
def _one_behind_the_other(weights: list[Tensor]) -> Tensor:
    """Matrices (m, d), (n, d) … as one (m + n + …, d). Where they do not lie so yet, they are moved."""
    first, place, memory = weights[0], weights[0].data_ptr(), weights[0].untyped_storage().data_ptr()
    for weight in weights:
        if weight.data_ptr() != place or weight.untyped_storage().data_ptr() != memory or not weight.is_contiguous():
            break
        place += weight.nbytes
    else:
        return first.detach().as_strided((sum(map(len, weights)), first.shape[1]), first.stride())
    matrix = torch.cat(weights)
    for weight, part in zip(weights, matrix.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    return matrix
