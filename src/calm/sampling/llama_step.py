"""More positions of growing texts through a Llama, in as few calls as it takes.

transformers' forward pass is made for all that training and research may ask of it. For a single position what it does
around its products takes as long as many of them do, so here is the same computation with nothing around it, on layers
and weights of transformers or of models/llama.py. docs/performance.md has the numbers.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from calm.linear import side_by_side
from calm.models.llama import Llama
from calm.products import FEW
from calm.sampling.cache import Cache
from calm.sampling.native_step import NativeStep

Rotation = Callable[[Tensor], Tensor]  # of heads (B, heads, L, d), each position by its angles


class Seen(NamedTuple):
    """What positions may attend to."""

    mask: Tensor | None  # (B, 1, L, all), where they do not all see the same
    causal: bool = False  # whether each of them sees those up to itself, and there are no others


def takes_steps(backbone: Any) -> bool:
    """Whether it is a Llama, ours, or as transformers builds it, for inference, and nobody hooked into its modules."""
    if isinstance(backbone, Llama):
        return True
    theirs = sys.modules.get("transformers.models.llama.modeling_llama")  # without the module there is no such model
    if theirs is None or type(backbone) is not theirs.LlamaModel:
        return False
    if backbone.training or backbone.config._attn_implementation != "sdpa":
        return False
    hooks = ("_forward_pre_hooks", "_forward_hooks", "forward")  # the last where another function was put in its place
    return not any(vars(part).get(name) for part in backbone.modules() for name in hooks)


def seen(there: Tensor, length: int) -> Seen:
    """By the last positions of texts (B, all), of which some places are there."""
    total = there.shape[1]
    if bool(there.all()) and (length == 1 or length == total):
        return Seen(None, causal=length > 1)
    places = torch.arange(total, device=there.device)
    own = places[total - length :, None]  # (L, 1)
    before = there[:, None, None] & (places <= own)  # (B, 1, L, all)
    return Seen(before | (places == own))  # a place that is not there sees at least itself: its state is a number


def rotation(cosines: Tensor, sines: Tensor) -> Rotation:
    """By cosines and sines (B, L, d) of angles. Of a single position it is one matrix, which is one call a layer."""
    half = sines.shape[-1] // 2
    sines = torch.cat([-sines[..., :half], sines[..., half:]], dim=-1)  # of the other half of the numbers
    if cosines.shape[1] == 1:
        matrix = torch.diag_embed(cosines[:, 0]) + torch.diag_embed(sines[:, 0]).roll(-half, 1)  # (B, d, d)
        return lambda heads: torch.bmm(heads[:, :, 0], matrix)[:, :, None]
    return lambda heads: torch.addcmul(heads * cosines[:, None], heads.roll(half, -1), sines[:, None])


class LlamaStep:
    def __init__(self, backbone: Any):
        self.backbone = backbone
        self.layers = [LayerStep(layer) for layer in backbone.layers]
        self.norm = NormStep(backbone.norm)
        self.native = NativeStep(self) if NativeStep.takes(self) else None

    def __call__(self, embedded: Tensor, there: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """States behind the last of more positions (B, L, H) of texts in the cache: (B, H). See Predictor.read."""
        count, length, size = embedded.shape
        cosines, sines = self.backbone.rotary_emb(embedded, positions)
        if self.native is not None and length == 1 and count <= FEW and cache.get_seq_length():
            return self.native(embedded, there, cosines, sines, cache)
        visible, rotate = seen(there, length), rotation(cosines, sines)
        states = embedded.reshape(-1, size)  # (B·L, H)
        for layer, memory in zip(self.layers, cache.layers, strict=True):
            states = layer(states, count, rotate, visible, memory)
        return self.norm(states.view(count, length, size)[:, -1])


class NormStep:
    """x·w / √(mean x² + eps) in four calls: √(|x|² + H·eps) is the length of two sides."""

    def __init__(self, norm: Any):
        self.norm, size = norm, len(norm.weight)
        self.scale = size**0.5
        self.dtype = torch.promote_types(norm.weight.dtype, torch.float32)  # half the digits are too few for a length
        self.least = norm.weight.new_full((1, 1), (size * norm.variance_epsilon) ** 0.5, dtype=self.dtype)
        self.zero = torch.zeros_like(self.least)

    def __call__(self, states: Tensor) -> Tensor:
        """(n, H) → (n, H)."""
        lengths = torch.hypot(torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=self.dtype), self.least)
        return torch.addcdiv(self.zero, states, lengths, value=self.scale).mul_(self.norm.weight).to(states.dtype)


class LayerStep:
    """x + attention(norm(x)), then x + SwiGLU(norm(x)), for states (B·L, H)."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.activation = attention, mlp.act_fn
        self.before_attention = NormStep(layer.input_layernorm)
        self.before_mlp = NormStep(layer.post_attention_layernorm)
        self.project = side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = side_by_side([attention.o_proj])
        self.gate_up = side_by_side([mlp.gate_proj, mlp.up_proj])
        self.down = side_by_side([mlp.down_proj])
        heads, shared = attention.config.num_attention_heads, attention.config.num_key_value_heads
        self.turned, self.kinds = [heads + shared, shared], [heads, shared]

    def __call__(self, states: Tensor, count: int, rotate: Rotation, visible: Seen, memory: Any) -> Tensor:
        attended = self._attended(self.project(self.before_attention(states)), count, rotate, visible, memory)
        states = self.output(attended).add_(states)
        gate, up = self.gate_up(self.before_mlp(states)).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up)).add_(states)

    def _attended(self, projected: Tensor, count: int, rotate: Rotation, visible: Seen, memory: Any) -> Tensor:
        """(B·L, projections) → (B·L, heads·d)."""
        size = self.attention.head_dim
        heads = projected.view(count, -1, sum(self.turned), size).transpose(1, 2)  # (B, heads, L, d)
        turned, values = heads.split(self.turned, dim=1)
        queries, keys = rotate(turned).split(self.kinds, dim=1)
        keys, values = memory.update(keys, values)
        found = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            visible.mask,
            is_causal=visible.causal,
            scale=self.attention.scaling,
            enable_gqa=True,
        )
        return found.transpose(1, 2).reshape(len(projected), -1)
