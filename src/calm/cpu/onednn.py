"""Matrix products of many rows by oneDNN.

torch multiplies in fp32 with MKL, which does not use AVX-512 on all processors that have it; oneDNN, which torch ships
as well, does. benchmarks/layers.py measures the difference. It is used wherever there is AVX-512, and never by a
measurement: a run that is resumed must be the run that was not interrupted.
"""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from calm.autoencoder import SplitLinear, VocabularyProjection


@cache
def product() -> Any | None:
    """oneDNN's linear operator, or None if there is none, or nothing to gain."""
    if not torch.backends.mkldnn.is_available() or not torch.cpu.get_capabilities().get("avx512_f"):
        return None
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is not None:
        register_flop_formula(operator)(_flops)
    return operator


def _flops(rows: torch.Size, matrix: torch.Size, *_: Any, **__: Any) -> int:
    """For torch's FLOP counter: (..., d), (m, d)."""
    return 2 * rows.numel() * matrix[0]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, with gradients; by oneDNN where that is possible."""
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and not is_transformed()
    if not plain or product() is None:
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return cast(Any, product())(x, weight, bias, "none", [], "")
    return cast(Tensor, _Linear.apply(x, weight, bias))


def is_transformed() -> bool:
    """Whether torch asks for more than values and gradients: autocast, a graph, or a functorch transform."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return True
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportAttributeAccessIssue]


class _Linear(torch.autograd.Function):
    """The gradient of the weight, a product of long columns, stays with MKL, which is as fast there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return cast(Any, product())(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, len(weight))
        return (
            linear(gradient, weight.T) if of_x else None,
            flat.T @ x.reshape(-1, weight.shape[1]) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


class OneDNNLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class OneDNNSplitLinear(SplitLinear):
    def project(self, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(input, weight, bias)


class OneDNNProjection(VocabularyProjection):
    def forward(self, states: Tensor, vocabulary: Tensor) -> Tensor:
        return linear(states, vocabulary)


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: OneDNNLinear,
    SplitLinear: OneDNNSplitLinear,
    VocabularyProjection: OneDNNProjection,
}
