"""Small-batch GEMM: linear layers for the few rows of a decoding step.

For a few rows torch reads the weights on one core, at less than half of the memory bandwidth. The native kernel reads
them at full speed; without it, the matrix is cut into slices, a batched product for all cores. Which way is taken
depends on shapes and the processor alone, so that the same seed gives the same text.
"""

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calm.autoencoder import SplitLinear, VocabularyProjection
from calm.cpu import native, onednn
from calm.cpu.allocator import on_huge_pages

SLICES = 16
NATIVE_ROWS = 4  # up to which the native kernel is faster
SLICED_ROWS = 64  # beyond which slices gain nothing
MIN_ELEMENTS, MIN_ELEMENTS_MANY_ROWS = 2**17, 2**19  # of a matrix that gains from slices


def is_small_batch(x: Tensor, rows: int) -> bool:
    """Whether x (..., d) has at most so many rows, in fp32 on a CPU, with nothing but the values asked for."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or not 0 < x.numel() <= rows * x.shape[-1]:
        return False
    return not torch.is_grad_enabled() and not onednn.is_transformed()


def small_batch_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows (n, d), a contiguous matrix (m, d), a bias (m,) → (n, m)."""
    count = len(x)
    if count <= NATIVE_ROWS and native.supports(weight):
        return native.linear(x, weight, bias)
    if count > NATIVE_ROWS and onednn.product() is not None:
        return onednn.linear(x, weight, bias)
    slices = gcd(len(weight), SLICES)
    least = MIN_ELEMENTS if count <= NATIVE_ROWS else MIN_ELEMENTS_MANY_ROWS
    if count > SLICED_ROWS or slices == 1 or weight.numel() < least or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    parts = weight.view(slices, -1, weight.shape[1]).transpose(1, 2)  # (slices, d, m / slices)
    output = torch.bmm(x.expand(slices, -1, -1), parts)  # (slices, n, m / slices)
    output = output.view(1, -1) if count == 1 else output.transpose(0, 1).reshape(count, -1)
    return output if bias is None else output.add_(bias)


class FastLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if not is_small_batch(input, SLICED_ROWS):
            return onednn.linear(input, self.weight, self.bias)
        output = small_batch_linear(input.reshape(-1, self.in_features), self.weight, self.bias)
        return output.view(*input.shape[:-1], self.out_features)


class FastSplitLinear(SplitLinear):
    def project(self, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if not is_small_batch(input, SLICED_ROWS):
            return onednn.linear(input, weight, bias)
        return small_batch_linear(input.reshape(-1, self.in_features), weight, bias).view(*input.shape[:-1], -1)


class FastProjection(VocabularyProjection):
    def forward(self, states: Tensor, vocabulary: Tensor) -> Tensor:
        if not is_small_batch(states, SLICED_ROWS):
            return onednn.linear(states, vocabulary)
        return small_batch_linear(states.reshape(-1, states.shape[-1]), vocabulary).view(*states.shape[:-1], -1)


@torch.no_grad()
def fuse(layers: list[Any]) -> Tensor:
    """The weights of several linear layers as one matrix on huge pages; the layers keep views of it.

    Weights that already are neighbors in memory stay where they are.
    """
    weights = [layer.weight for layer in layers]
    first, lengths = weights[0].detach(), [len(weight) for weight in weights]
    if _are_neighbors(weights) and (len(weights) > 1 or on_huge_pages(first) is first):
        return first.as_strided((sum(lengths), first.shape[1]), first.stride())
    matrix = on_huge_pages(torch.cat(weights) if len(weights) > 1 else first)
    for weight, part in zip(weights, matrix.split(lengths), strict=True):
        weight.data = part
    return matrix


def _are_neighbors(weights: list[Tensor]) -> bool:
    place, memory = weights[0].data_ptr(), weights[0].untyped_storage().data_ptr()
    for weight in weights:
        if weight.data_ptr() != place or weight.untyped_storage().data_ptr() != memory or not weight.is_contiguous():
            return False
        place += weight.nbytes
    return True
