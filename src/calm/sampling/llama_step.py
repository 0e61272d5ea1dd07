"""More positions of growing texts through a Llama, in as few calls as it takes.

transformers' forward pass is made for all that training and research may ask of it. For a single position what it does
around its products takes as long as many of them do, so here is the same computation with nothing around it, on layers
and weights of transformers or of models/llama.py. docs/performance.md has the numbers.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from calm.models.llama import Llama
from calm.products import side_by_side
from calm.sampling.cache import Cache

Turns = tuple[Tensor, Tensor]  # cosines and sines of the positions (B, 1, L, d), the sines' first half negated


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


class LlamaStep:
    def __init__(self, backbone: Any):
        self.backbone = backbone
        self.layers = [LayerStep(layer) for layer in backbone.layers]

    def __call__(self, embedded: Tensor, there: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """States behind the last of more positions (B, L, H) of texts in the cache: (B, H). See Predictor.read."""
        count, length, _ = embedded.shape
        visible = seen(there, length)
        cosines, sines = self.backbone.rotary_emb(embedded, positions)  # (B, L, d)
        first, second = sines.chunk(2, dim=-1)
        turns = cosines[:, None], torch.cat([-first, second], dim=-1)[:, None]
        states = embedded.flatten(0, 1)  # (B·L, H)
        for layer, memory in zip(self.layers, cache.layers, strict=True):
            states = layer(states, count, turns, visible, memory)
        return _normed(states.unflatten(0, (count, length))[:, -1], self.backbone.norm)


class LayerStep:
    """x + attention(norm(x)), then x + SwiGLU(norm(x)), for states (B·L, H)."""

    def __init__(self, layer: Any):
        self.layer, self.attention, self.mlp = layer, layer.self_attn, layer.mlp
        self.project = side_by_side([self.attention.q_proj, self.attention.k_proj, self.attention.v_proj])
        self.gate_up = side_by_side([self.mlp.gate_proj, self.mlp.up_proj])
        config = self.attention.config
        self.heads, self.shared = config.num_attention_heads, config.num_key_value_heads

    def __call__(self, states: Tensor, count: int, turns: Turns, visible: Seen, memory: Any) -> Tensor:
        projected = self.project(_normed(states, self.layer.input_layernorm)).unflatten(0, (count, -1))
        states = states + self.attention.o_proj(self._attended(projected, turns, visible, memory))
        gate, up = self.gate_up(_normed(states, self.layer.post_attention_layernorm)).chunk(2, dim=-1)
        return states + self.mlp.down_proj(self.mlp.act_fn(gate) * up)

    def _attended(self, projected: Tensor, turns: Turns, visible: Seen, memory: Any) -> Tensor:
        """(B, L, projections) → (B·L, heads·d)."""
        heads = projected.unflatten(-1, (-1, self.attention.head_dim)).transpose(1, 2)  # (B, heads, L, d)
        turned, values = heads.split([self.heads + self.shared, self.shared], dim=1)
        cosines, sines = turns
        turned = torch.addcmul(turned * cosines, turned.roll(turned.shape[-1] // 2, -1), sines)
        queries, keys = turned.split([self.heads, self.shared], dim=1)
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
        return found.transpose(1, 2).flatten(2).flatten(0, 1)


def _normed(states: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(states, states.shape[-1:], norm.weight, norm.variance_epsilon)
