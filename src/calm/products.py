"""Matrix products on CPUs, each in the way that is fast for its shape. docs/performance.md has the numbers.

few rows    A text that grows has one row, a small batch a few. For these the libraries' product reads the matrix on one
            core, at less than half of what memory gives, and two rows take twice the time of one. native.c reads as
            fast as memory gives; without it the matrix is cut into slices, a batch of products for all cores.
many rows   torch multiplies with MKL, which on processors of other makers seems to leave AVX-512 alone. oneDNN, which
            torch brings along, too, uses it.

Which way is taken depends on shapes and on the processor, never on a measurement: a seed gives the same text again, and
a run that is continued is the run that was not interrupted.
"""

from math import gcd
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from calm import native

SLICES = 16
FEW, MANY = 4, 64  # rows: for which smaller matrices gain, too, and beyond which nothing is gained
SMALL, SMALL_FOR_SOME = 2**17, 2**19  # numbers of a matrix that gains nothing, for few rows and for more


def _wide() -> bool:
    """Whether this is a processor on which oneDNN was found to be faster: registers of 512 bits, not Intel's."""
    found = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and bool(found.get("avx512_f")) and "AMD" in found.get("cpu_name", "")


WIDE = _wide()
ONE_DNN = torch.ops.mkldnn._linear_pointwise


@register_flop_formula(ONE_DNN)
def _flops(rows: torch.Size, matrix: torch.Size, *_: Any, **__: Any) -> int:
    """For torch's counter: (..., d), (m, d)."""
    return 2 * rows.numel() * matrix[0]


def linear(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Many rows: (..., d), (m, d), (m,) → rows @ matrix.T + bias, with gradients."""
    if WIDE and rows.device.type == "cpu" and rows.dtype == matrix.dtype == torch.float32 and not transformed():
        return cast(Tensor, _Linear.apply(rows, matrix, bias))
    return F.linear(rows, matrix, bias)


def are_few(rows: Tensor, most: int) -> bool:
    """Whether these are at most so many rows (..., d) of a text that is written, on a CPU in fp32."""
    few = 0 < rows.numel() <= most * rows.shape[-1] and rows.device.type == "cpu" and rows.dtype == torch.float32
    return few and not torch.is_grad_enabled() and not transformed()


def transformed() -> bool:
    """Whether more than the product is wanted of it: half the digits, a graph, or a derivative by torch.func."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return True
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportAttributeAccessIssue]


class _Linear(torch.autograd.Function):
    """By oneDNN. The gradient of the matrix, a product of long columns, stays with MKL, which is as fast there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        return ONE_DNN(rows, matrix, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (rows, matrix) = gradients, ctx.saved_tensors
        of_rows, of_matrix, of_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, len(matrix))
        return (
            linear(gradient, matrix.T) if of_rows else None,
            flat.T @ rows.reshape(-1, matrix.shape[1]) if of_matrix else None,
            flat.sum(0) if of_bias else None,
        )


class FewRows:
    """Few rows times one matrix (m, d), which may change but not move: rows (n, d) → rows @ matrix.T + bias.

    Without gradients.
    """

    def __init__(self, matrix: Tensor):
        self.matrix, self.place, (count, size) = matrix, matrix.data_ptr(), matrix.shape
        self.slices = gcd(count, SLICES)
        self.most = 0  # rows for which slices gain
        fast = matrix.dtype.itemsize >= torch.float32.itemsize  # for smaller numbers batches of products are not
        here = matrix.device.type == "cpu" and matrix.is_contiguous()
        self.native = native.takes(matrix)
        self.small = matrix.numel() < SMALL
        if here and fast and self.slices > 1 and not self.small:
            self.most = MANY if matrix.numel() >= SMALL_FOR_SOME and not WIDE else FEW
            self.parts = matrix.view(self.slices, -1, size).transpose(1, 2)  # (slices, d, m / slices)

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        count = len(rows)
        if count <= FEW and self.native:
            return native.product(rows, self.matrix, bias)
        if count > self.most:
            plain = self.small and count <= FEW
            return F.linear(rows, self.matrix, bias) if plain else linear(rows, self.matrix, bias)
        found = torch.bmm(rows.expand(self.slices, -1, -1), self.parts)  # (slices, n, m / slices)
        found = found.view(1, -1) if count == 1 else found.transpose(0, 1).reshape(count, -1)
        return found if bias is None else found.add_(bias)


def long_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """The same for a long matrix, like that of all words: it is faster as the first factor."""
    count, size = rows.shape
    if count > (FEW if WIDE else MANY) or rows.device.type != "cpu":
        return linear(rows, matrix)
    if count <= FEW and rows.dtype == matrix.dtype and native.takes(matrix) and not torch.is_grad_enabled():
        return native.product(rows, matrix)
    slices = gcd(len(matrix), SLICES)
    if slices > 1:
        parts = matrix.view(slices, -1, size)
        return torch.bmm(parts, rows.T.expand(slices, size, count)).flatten(0, 1).T
    if count == 1:  # twice the same row is faster than a matrix times a vector
        return (matrix @ rows.expand(2, size).contiguous().T).T[:1]
    return (matrix @ rows.T).T
