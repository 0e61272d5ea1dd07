"""One more position of a single text through a Llama, in one call of native.c."""

import ctypes
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
        self.layers = (native.Layer * len(step.layers))(
            *(native.Layer(*(weight.data_ptr() for weight in weights)) for weights in self.weights)
        )
        self.scratch = size + 2 * (heads + shared) * width + inner  # numbers

    @staticmethod
    def takes(step: Any) -> bool:
        """Whether it is a Llama in fp32 on a CPU, each of whose layers is made of four matrices, and no bias."""
        products = [p for layer in step.layers for p in (layer.project, layer.output, layer.gate_up, layer.down)]
        if not products or not all(isinstance(product, FewRows) for product in products):
            return False
        weights = [weight for layer in step.layers for weight in _weights(layer)]
        return step.layers[0].attention.config.hidden_act == "silu" and native.takes(*weights)

    def __call__(self, embedded: Tensor, cosines: Tensor, sines: Tensor, cache: Cache) -> Tensor:
        """States behind one more position (1, 1, H) of the text in the cache: (1, H)."""
        state = embedded.reshape(1, -1).clone()
        length = cache.get_seq_length() + 1
        room = 0
        for layer, memory in zip(self.layers, cache.layers, strict=True):
            keys, values = memory.reserve()  # (1, heads, L, d)
            layer.keys, layer.values, room = keys.data_ptr(), values.data_ptr(), keys.stride(1) // keys.shape[-1]
        scratch, functions = state.new_empty(self.scratch), native.library()
        assert functions is not None
        functions.calm_llama_step(
            ctypes.byref(self.llama),
            self.layers,
            *(numbers.data_ptr() for numbers in (state, cosines, sines)),
            length,
            room,
            scratch.data_ptr(),
            torch.get_num_threads(),
        )
        return state


def _weights(layer: Any) -> tuple[Tensor, ...]:
    """In the order of native.Layer."""
    return (
        *(layer.before_attention.norm.weight, layer.project.matrix, layer.output.matrix),
        *(layer.before_mlp.norm.weight, layer.gate_up.matrix, layer.down.matrix),
    )
