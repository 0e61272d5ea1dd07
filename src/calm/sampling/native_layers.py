"""Layers of heads and of the decoder for texts that grow: few rows, each layer in one call of native.c."""

from typing import Any, cast

from torch import Tensor, nn

from calm import native
from calm.heads.energy import Block
from calm.linear import FastLinear
from calm.models.layer import Layer
from calm.products import FEW, are_few


class NativeLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights = _weights(x, self.norm, self.gate, self.up, self.down)
        return super().forward(x) if weights is None else native.layer(x, weights, cast(float, self.norm.eps))


class NativeBlock(Block):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        weights = None
        if len(x) == 1 and x.shape[1:] == condition.shape and x.dtype == condition.dtype:  # a condition for each row
            weights = _weights(x, self.norm, self.fuse_state, self.fuse_condition, self.mix, self.gate_up, self.down)
        if weights is None:
            return super().forward(x, condition)
        return native.energy_block(x, condition, weights, self.norm.eps)


KINDS = {Layer: NativeLayer, Block: NativeBlock}


def take_native_layers(model: nn.Module) -> None:
    """Let the layers of a model that writes be these; their weights stay."""
    if native.library() is not None:
        for module in model.modules():
            module.__class__ = KINDS.get(type(module), type(module))


def _weights(rows: Tensor, norm: Any, *layers: Any) -> list[Tensor] | None:
    """Of a norm and linear layers, in their order, if they can be multiplied with these rows in native.c."""
    if not are_few(rows, FEW) or not all(_is_plain(layer) for layer in layers):
        return None
    found = [weight for part in (norm, *layers) for weight in part._parameters.values() if weight is not None]
    return found if native.takes(rows, *found) else None


def _is_plain(layer: Any) -> bool:
    """Not in eight bits, and nobody looks at what goes in or comes out."""
    return type(layer) is FastLinear and not layer._forward_hooks and not layer._forward_pre_hooks
