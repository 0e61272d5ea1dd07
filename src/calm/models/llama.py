"""The weights of a Llama under transformers' names, without transformers, for models that only write.

How they are used is in sampling/llama_step.py, which does not care whose Llama it is.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Rotary(nn.Module):
    """Cosines and sines of positions, for pairs of numbers that turn at rates from 1 down to 1/theta."""

    def __init__(self, size: int, theta: float):
        super().__init__()
        self.size, self.theta = size, theta

    def forward(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L) → twice (B, L, d), in the numbers of the states."""
        places = torch.arange(0, self.size, 2, device=positions.device)
        rates = 1.0 / self.theta ** (places.float() / self.size)
        angles = positions[..., None].float() * rates
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(states.dtype), angles.sin().to(states.dtype)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.empty(size)), eps


class Attention(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.config, self.head_dim, self.scaling = config, config.head_dim, config.head_dim**-0.5
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, config.attention_bias)


class FeedForward(nn.Module):
    act_fn = staticmethod(F.silu)

    def __init__(self, config: Any):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)


class Layer(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), FeedForward(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """`config` has the fields of a LlamaConfig; `describes` tells whether they are all that matters here."""

    def __init__(self, config: Any):
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config.head_dim, config.rope_parameters["rope_theta"])

    @staticmethod
    def describes(fields: dict[str, Any]) -> bool:
        """Whether a config.json's fields are those of a plain Llama: SiLU, angles that nobody stretched."""
        usual = {"model_type": "llama", "hidden_act": "silu"}
        angles = fields.get("rope_parameters") or {}
        return all(fields.get(name) == value for name, value in usual.items()) and (
            set(angles) == {"rope_type", "rope_theta"} and angles["rope_type"] == "default"
        )
