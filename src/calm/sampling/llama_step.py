"""One more position of growing texts through a Llama, in as few calls as it takes.

transformers' forward pass is made for all that training and research may ask of it. For a single position what it does
around its products takes as long as many of them do, so here is the same computation with nothing around it. Layers,
weights and cache stay transformers'. docs/performance.md has the numbers.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaModel
from transformers.cache_utils import Cache

from calm.products import side_by_side

Turns = tuple[Tensor, Tensor]  # cosines and sines of the positions (B, 1, 1, d), the sines' first half negated


def takes_steps(backbone: nn.Module) -> bool:
    """Whether it is a Llama as transformers builds it, for inference, and nobody hooked into its modules."""
    if type(backbone) is not LlamaModel or backbone.training or backbone.config._attn_implementation != "sdpa":
        return False
    hooks = ("_forward_pre_hooks", "_forward_hooks", "forward")  # the last where another function was put in its place
    return not any(vars(part).get(name) for part in backbone.modules() for name in hooks)


class LlamaStep:
    def __init__(self, backbone: LlamaModel):
        self.backbone: Any = backbone
        self.layers = [LayerStep(layer) for layer in backbone.layers]

    def __call__(self, embedded: Tensor, there: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """States behind one more position (B, 1, H) of texts in the cache: (B, H). `there` as Predictor.read has it."""
        mask = None if bool(there.all()) else there[:, None, None]
        cosines, sines = self.backbone.rotary_emb(embedded, positions)  # (B, 1, d)
        first, second = sines.chunk(2, dim=-1)
        turns = cosines[:, None], torch.cat([-first, second], dim=-1)[:, None]
        states = embedded[:, 0]
        for layer, memory in zip(self.layers, cache.layers, strict=True):
            states = layer(states, turns, mask, memory)
        return _normed(states, self.backbone.norm)


class LayerStep:
    """x + attention(norm(x)), then x + SwiGLU(norm(x)), for states (B, H)."""

    def __init__(self, layer: Any):
        self.layer, self.attention, self.mlp = layer, layer.self_attn, layer.mlp
        self.project = side_by_side([self.attention.q_proj, self.attention.k_proj, self.attention.v_proj])
        self.gate_up = side_by_side([self.mlp.gate_proj, self.mlp.up_proj])
        config = self.attention.config
        self.heads, self.shared = config.num_attention_heads, config.num_key_value_heads

    def __call__(self, states: Tensor, turns: Turns, mask: Tensor | None, memory: Any) -> Tensor:
        projected = self.project(_normed(states, self.layer.input_layernorm))
        states = states + self.attention.o_proj(self._attended(projected, turns, mask, memory))
        gate, up = self.gate_up(_normed(states, self.layer.post_attention_layernorm)).chunk(2, dim=-1)
        return states + self.mlp.down_proj(self.mlp.act_fn(gate) * up)

    def _attended(self, projected: Tensor, turns: Turns, mask: Tensor | None, memory: Any) -> Tensor:
        heads = projected.view(len(projected), -1, 1, self.attention.head_dim)
        turned, values = heads.split([self.heads + self.shared, self.shared], dim=1)
        cosines, sines = turns
        turned = torch.addcmul(turned * cosines, turned.roll(turned.shape[-1] // 2, -1), sines)
        queries, keys = turned.split([self.heads, self.shared], dim=1)
        keys, values = memory.update(keys, values)
        found = F.scaled_dot_product_attention(
            queries, keys, values, mask, scale=self.attention.scaling, enable_gqa=True
        )
        return found.reshape(len(projected), -1)


def _normed(states: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(states, states.shape[-1:], norm.weight, norm.variance_epsilon)
