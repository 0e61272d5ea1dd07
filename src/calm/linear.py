"""Linear layers whose products take the fast ways of products.py, in training and in writing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from calm.allocator import on_huge_pages
from calm.products import MANY, FewRows, are_few, linear


class FastLinear(nn.Linear):
    """The layer that it was, on CPUs in less time."""

    product: FewRows | None = None  # with the weights where they lie now

    def forward(self, input: Tensor) -> Tensor:
        if not are_few(input, MANY):
            return linear(input, self.weight, self.bias)
        rows = input if input.ndim == 2 else input.reshape(-1, self.in_features)
        if self.product is None or self.product.place != self.weight.data_ptr():
            self.product = FewRows(self.weight)
        found = self.product(rows, self.bias)
        return found if input.ndim == 2 else found.view(*input.shape[:-1], self.out_features)


def change_layers(model: nn.Module, kind: type[nn.Linear] = FastLinear) -> None:
    """Let the linear layers of a model be of this kind; their weights stay."""
    for module in model.modules():
        if type(module) in (nn.Linear, FastLinear):
            module.__class__ = kind


def prepare_for_writing(model: nn.Module) -> None:
    """Fast layers, and their matrices on huge pages."""
    change_layers(model)
    for module in model.modules():
        if type(module) is FastLinear and not module.weight.is_inference():
            module.weight.data = on_huge_pages(module.weight.data)


def side_by_side(layers: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """Linear layers of the same rows as one product: (n, d) → (n, all that they give). For inference.

    Their weights come to lie one behind the other, in memory that is one matrix, and stay the layers' own. Layers of
    other kinds, or with a bias, are called one by one.
    """
    weights = [layer.weight for layer in layers if type(layer) in (nn.Linear, FastLinear) and layer.bias is None]
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
