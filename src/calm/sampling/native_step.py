"""One more position of few texts through a Llama, in one call of native.c."""

from typing import Any

import torch
from torch import Tensor

from calm import native
from calm.products import FewRows
from calm.sampling.cache import Cache


class NativeStep:
    """`step` is a LlamaStep, whose weights it reads where they lie."""

    def __init__(self, step: Any):
        first = step.layers[0]
        heads, shared = first.kinds
        size, width = len(first.before_attention.norm.weight), first.attention.head_dim
        inner = first.down.matrix.shape[1]
        self.weights = [[weight.detach() for weight in _weights(layer)] for layer in step.layers]  # theirs, and kept
        self.norm = step.norm.norm.weight.detach()
        self.llama = native.Llama(
            *(len(step.layers), size, inner, heads, shared, width),
            *(step.norm.norm.variance_epsilon, first.attention.scaling, self.norm.data_ptr()),
        )
        self.layers = (native.LlamaLayer * len(step.layers))(
            *(native.LlamaLayer(*(weight.data_ptr() for weight in weights)) for weights in self.weights)
        )

    @staticmethod
    def takes(step: Any) -> bool:
        """Whether it is a Llama in fp32 on a CPU, each of whose layers is made of four matrices, and no bias."""
        products = [p for layer in step.layers for p in (layer.project, layer.output, layer.gate_up, layer.down)]
        if not products or not all(isinstance(product, FewRows) for product in products):
            return False
        weights = [weight for layer in step.layers for weight in _weights(layer)]
        return step.layers[0].attention.config.hidden_act == "silu" and native.takes(*weights)

    def __call__(self, embedded: Tensor, there: Tensor, cosines: Tensor, sines: Tensor, cache: Cache) -> Tensor:
        """States behind one more position (B, 1, H) of the texts in the cache: (B, H)."""
        states = embedded[:, 0].clone(memory_format=torch.contiguous_format)
        cosines, sines = cosines.contiguous(), sines.contiguous()
        length = there.shape[1]
        first = (~there).sum(1).clamp_(max=length - 1)  # who has not begun sees itself
        room = 0
        for layer, memory in zip(self.layers, cache.layers, strict=True):
            keys, values = memory.reserve()  # (B, heads, L, d)
            layer.keys, layer.values, room = keys.data_ptr(), values.data_ptr(), keys.stride(1) // keys.shape[-1]
        native.llama_step(self.llama, self.layers, states, cosines, sines, first, length, room)
        return states


def _weights(layer: Any) -> tuple[Tensor, ...]:
    """In the order of native.LlamaLayer."""
    return (
        *(layer.before_attention.norm.weight, layer.project.matrix, layer.output.matrix),
        *(layer.before_mlp.norm.weight, layer.gate_up.matrix, layer.down.matrix),
    )
