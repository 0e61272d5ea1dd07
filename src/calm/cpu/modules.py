"""Modules that take the place of others for inference: same weights, same names, same results."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from calm.autoencoder import SplitLinear, SwiGLULayer, VocabularyProjection
from calm.cpu import native, onednn
from calm.cpu.allocator import on_huge_pages
from calm.cpu.linear import (
    NATIVE_ROWS,
    SLICED_ROWS,
    FastLinear,
    FastProjection,
    FastSplitLinear,
    fuse,
    is_small_batch,
    small_batch_linear,
)
from calm.heads.energy import EnergyBlock
from calm.kv_cache import KVCache
from calm.llama import Attention, FeedForward, Llama, rotary_embedding


class NativeSwiGLULayer(SwiGLULayer):
    def forward(self, x: Tensor) -> Tensor:
        weights = _native_weights(x, self.norm, self.gate, self.up, self.down)
        return super().forward(x) if weights is None else native.swiglu_layer(x, weights, cast(float, self.norm.eps))


class NativeEnergyBlock(EnergyBlock):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        weights = None
        if len(x) == 1 and x.shape[1:] == condition.shape and x.dtype == condition.dtype:  # one condition per row
            weights = _native_weights(
                x, self.norm, self.fuse_state, self.fuse_condition, self.mix, self.gate_up, self.down
            )
        if weights is None:
            return super().forward(x, condition)
        return native.energy_block(x, condition, weights, self.norm.eps)


def _native_weights(x: Tensor, norm: Any, *layers: Any) -> list[Tensor] | None:
    """Weights of a norm and of linear layers in order, if the native kernel can take them."""
    if not is_small_batch(x, NATIVE_ROWS) or not x.is_contiguous() or not all(_is_plain(layer) for layer in layers):
        return None
    weights = [weight for part in (norm, *layers) for weight in part._parameters.values() if weight is not None]
    return weights if native.supports(*weights) else None


def _is_plain(layer: nn.Module) -> bool:
    """Not quantized or adapted, and without hooks."""
    return type(layer) in (nn.Linear, FastLinear) and not _is_hooked(layer)


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody sees or changes its calls: by hooks, or by a `forward` of the instance, as accelerate does."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


class Fused(nn.Module):
    """Several linear layers of the same input as one product, for the few rows of a decoding step."""

    fused: Tensor | None = None  # their weights, one below the other; None: not supported

    def fused_product(self, x: Tensor) -> Tensor | None:
        if self.fused is None or not is_small_batch(x, SLICED_ROWS):
            return None
        return small_batch_linear(x.reshape(-1, x.shape[-1]), self.fused).view(*x.shape[:-1], -1)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, whose weights are elsewhere."""
        return {**self.__dict__, "fused": None}


class FusedAttention(Fused, Attention):
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        product = self.fused_product(x)
        if product is None:
            return super().project(x)
        sizes = [part.out_features for part in (self.q_proj, self.k_proj, self.v_proj)]
        return product.split(sizes, dim=-1)  # pyright: ignore[reportReturnType]


class FusedFeedForward(Fused, FeedForward):
    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = self.fused_product(x)
        return super().project(x) if product is None else product.chunk(2, dim=-1)  # pyright: ignore[reportReturnType]


class NativeLlama(Llama):
    """A decoding step of up to four sequences in one call of the native kernel; otherwise a Llama like any other."""

    weights: list[list[Tensor]] | None = None  # what the kernel's pointers refer to; None: not supported

    def prepare(self) -> None:
        """Fuse the weights of each layer, and point the kernel at them. Weights may change, but not move."""
        self.weights = None
        parts = [part for layer in cast(Any, self.layers) for part in (layer.self_attn, layer.mlp)]
        for part in parts:
            part.fused = None
        linears: list[Any] = [linear for part in parts for linear in part.children()]
        plain = all(_is_plain(linear) and linear.bias is None for linear in linears)
        hooked = any(map(_is_hooked, self.modules()))
        if not plain or hooked or not native.supports(*self.parameters()):
            return
        weights = []
        for layer in cast(Any, self.layers):
            attention, mlp = layer.self_attn, layer.mlp
            qkv = fuse([attention.q_proj, attention.k_proj, attention.v_proj])
            gate_up = fuse([mlp.gate_proj, mlp.up_proj])
            attention.fused, mlp.fused = qkv, gate_up
            output, down = fuse([attention.o_proj]), fuse([mlp.down_proj])
            norms = layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()
            weights.append([norms[0], qkv, output, norms[1], gate_up, down])
        config, norm = self.config, self.norm.weight.detach()
        self.kernel = native.Llama(
            len(weights),
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rms_norm_eps,
            config.head_dim**-0.5,
            norm.data_ptr(),
        )
        self.kernel_layers = (native.LlamaLayer * len(weights))(
            *(native.LlamaLayer(*(weight.data_ptr() for weight in layer)) for layer in weights)
        )
        self.weights = [*weights, [norm]]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: pointers stay behind, so that a copy decodes by torch until it is prepared."""
        return {**self.__dict__, "weights": None, "kernel": None, "kernel_layers": None}

    def forward(
        self, x: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        places = None
        if cache is not None and cache.length > 0 and x.shape[1] == 1:
            places = cache.places(mask)
        if self.weights is None or places is None or not is_small_batch(x, NATIVE_ROWS):
            return super().forward(x, positions, mask, cache)
        assert cache is not None
        return self._decode(x, positions, *places, cache)

    def _decode(self, x: Tensor, positions: Tensor | None, first: Tensor, last: Tensor, cache: KVCache) -> Tensor:
        count, length = len(x), cache.length + 1
        if positions is None:
            positions = torch.full((count, 1), cache.length)
        cosines, sines = (
            part.flatten(1).expand(count, -1).contiguous() for part in rotary_embedding(positions, self.config)
        )
        capacity, like = 0, x.new_empty(count, self.config.num_key_value_heads, 0, self.config.head_dim)
        for number, layer in enumerate(self.kernel_layers):
            cache.reserve(number, length, like)
            keys, values = cast(Tensor, cache.keys[number]), cast(Tensor, cache.values[number])
            layer.keys, layer.values, capacity = keys.data_ptr(), values.data_ptr(), keys.shape[-2]
        states = x[:, 0].clone(memory_format=torch.contiguous_format)
        native.llama_step(self.kernel, self.kernel_layers, states, cosines, sines, first, last, capacity)
        cache.length = length
        return states[:, None]


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    **dict.fromkeys((nn.Linear, onednn.OneDNNLinear), FastLinear),
    **dict.fromkeys((SplitLinear, onednn.OneDNNSplitLinear), FastSplitLinear),
    **dict.fromkeys((VocabularyProjection, onednn.OneDNNProjection), FastProjection),
    SwiGLULayer: NativeSwiGLULayer,
    EnergyBlock: NativeEnergyBlock,
    Attention: FusedAttention,
    FeedForward: FusedFeedForward,
    Llama: NativeLlama,
}


def replace_modules(model: nn.Module, replacements: dict[type[nn.Module], type[nn.Module]]) -> None:
    """Replace modules of exactly these types by others that share everything else: parameters, children, hooks."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if (kind := replacements.get(type(child))) is not None:
                new = parent._modules[name] = object.__new__(kind)
                new.__dict__.update(child.__dict__)


def prepare_decoding(model: nn.Module) -> None:
    """Replace modules for inference, and move their matrices to huge pages."""
    replace_modules(model, REPLACEMENTS)
    for module in model.modules():
        if isinstance(module, NativeLlama):
            module.prepare()  # first: matrices that it fuses are not moved twice
    for module in model.modules():
        if isinstance(module, FastLinear | FastSplitLinear) and not module.weight.is_inference():
            module.weight.data = on_huge_pages(module.weight.data)
