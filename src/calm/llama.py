"""Llama, the default backbone: one forward pass for training, evaluation, and generation.

Weights are named as in transformers, so that Llama checkpoints load as they are. Other backbones come from transformers
and are adapted to the same call in `hf.py`.
"""

import math
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from calm.errors import ConfigError, did_you_mean

SPARE_POSITIONS = 32  # capacity that a cache allocates ahead, at least; beyond that a quarter of its length


class LlamaConfig(BaseModel):
    """The fields of transformers' `LlamaConfig` that change what a Llama computes; others are kept as they are."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model_type: str = "llama"
    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int = 11_008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """`rope_theta` and `rope_scaling`, as transformers 4 wrote them."""
        fields = dict(fields)
        theta, scaling = fields.pop("rope_theta", None), fields.pop("rope_scaling", None)
        if not fields.get("rope_parameters"):
            scaling = {("rope_type" if name == "type" else name): value for name, value in (scaling or {}).items()}
            fields["rope_parameters"] = {"rope_theta": theta or 10_000.0, "rope_type": "default", **scaling}
        return fields

    @model_validator(mode="after")
    def _dependent_defaults(self) -> "LlamaConfig":
        if self.hidden_size % self.num_attention_heads and self.head_dim is None:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        return self

    @classmethod
    def checked(cls, fields: dict[str, Any]) -> "LlamaConfig":
        """From fields that a user wrote: unknown ones are refused."""
        known = {*cls.model_fields, "rope_theta", "rope_scaling", "bos_token_id", "eos_token_id", "pad_token_id"}
        for field in fields:
            if field not in known:
                raise ConfigError(f"backbone: llama has no field {field!r}{did_you_mean(field, known)}")
        try:
            return cls(**fields)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            message = problem["msg"].removeprefix("Value error, ")
            raise ConfigError(f"backbone: llama cannot be built: {place}: {message}") from error

    @staticmethod
    def describes(fields: dict[str, Any]) -> bool:
        """Whether a config.json describes a Llama that this file implements."""
        rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
        return (
            fields.get("model_type") == "llama"
            and fields.get("hidden_act", "silu") == "silu"
            and not fields.get("attention_dropout")
            and kind in ("default", "linear", "llama3")
        )

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump()


def check_positions(config: Any, length: int, unit: str) -> None:
    """Refuse a sequence that is longer than a backbone's positions."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ConfigError(
            f"{length} {unit} exceed the backbone's {longest} positions; use shorter sequences, or set the backbone's "
            "max_position_embeddings"
        )


class KVCache:
    """Keys and values of a batch of sequences, in preallocated memory.

    Per layer (B, heads, capacity, d), of which the first `length` positions are in use. Sequences are right-aligned:
    the last position of every row is its newest. A decoding step writes one position and copies nothing.
    """

    def __init__(self, num_layers: int):
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.length = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add positions (B, heads, L, d) to a layer; returns all of its keys and values. Layers come in order."""
        end = self.length + keys.shape[-2]
        self.reserve(layer, end, keys)
        held = []
        for memory, new in ((self.keys[layer], keys), (self.values[layer], values)):
            assert memory is not None
            memory[..., self.length : end, :] = new
            held.append(memory[..., :end, :])
        if layer == len(self.keys) - 1:
            self.length = end
        return held[0], held[1]

    def reserve(self, layer: int, length: int, like: Tensor) -> None:
        """Allocate so that a layer can hold `length` positions of tensors like (B, heads, any, d)."""
        for memories in (self.keys, self.values):
            memory = memories[layer]
            if memory is None or memory.shape[-2] < length:
                capacity = length + max(SPARE_POSITIONS, length // 4)
                larger = like.new_empty(*like.shape[:-2], capacity, like.shape[-1])
                if memory is not None and self.length:
                    larger[..., : self.length, :] = memory[..., : self.length, :]
                memories[layer] = larger

    def crop(self, length: int) -> None:
        """Forget all but the first positions."""
        self.length = min(self.length, length)

    def select(self, rows: Tensor, first: int = 0) -> None:
        """Keep some rows, from position `first` on."""
        for memories in (self.keys, self.values):
            for layer, memory in enumerate(memories):
                if memory is not None:
                    memories[layer] = memory[rows, :, first : self.length]
        self.length -= first

    def merge(self, other: "KVCache") -> None:
        """Add the rows of another cache; the shorter one is padded at its front."""
        length = max(self.length, other.length)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, (one, two) in enumerate(zip(mine, theirs, strict=True)):
                assert one is not None
                assert two is not None
                rows = one.new_zeros(len(one) + len(two), one.shape[1], length + SPARE_POSITIONS, one.shape[-1])
                rows[: len(one), :, length - self.length : length] = one[..., : self.length, :]
                rows[len(one) :, :, length - other.length : length] = two[..., : other.length, :]
                mine[layer] = rows
        self.length = length


def rotary_embedding(positions: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Cosines and sines for rotary position embeddings: positions (B, L) → twice (B, 1, L, d), in fp32."""
    rope = config.rope_parameters
    pairs = torch.arange(0, config.head_dim, 2, device=positions.device).float()
    frequencies = 1.0 / rope["rope_theta"] ** (pairs / config.head_dim)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        frequencies = frequencies / rope["factor"]
    elif kind == "llama3":  # low frequencies are stretched, high ones stay, with a ramp in between
        original, low, high = (
            rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        turns = original * frequencies / (2 * math.pi)  # in the context that the model was pretrained with
        ramp = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = torch.lerp(frequencies / rope["factor"], frequencies, ramp)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary embeddings to (B, heads, L, d)."""
    first, second = heads.chunk(2, dim=-1)
    return (heads * cosines + torch.cat([-second, first], dim=-1) * sines).to(heads.dtype)


def make_attention_mask(mask: Tensor | None, length: int, total: int, device: torch.device) -> Tensor | None:
    """What the last `length` of `total` positions attend to, as a boolean mask (B or 1, 1, length, total).

    `mask` (B, total) is false for padding; a four-dimensional one is taken as it is. None stands for plain causal
    attention, which needs no mask: `length` is 1 or `total`, and there is no padding.
    """
    if mask is not None and mask.ndim == 4:
        return mask
    if mask is None and length in (1, total):
        return None
    places = torch.arange(total, device=device)
    own = places[total - length :, None]  # (length, 1)
    visible = (places <= own)[None, None]
    if mask is None:
        return visible
    return (mask[:, None, None].bool() & visible) | (places == own)  # padding attends to itself: no NaN


class Attention(nn.Module):
    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, config.attention_bias)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], visible: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, L, d)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        causal = visible is None and x.shape[1] > 1
        y = F.scaled_dot_product_attention(q, k, v, visible, is_causal=causal, enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], visible: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, visible, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A decoder-only Transformer from embeddings to hidden states; it has no token embedding of its own.

    Args:
        config: a `LlamaConfig`, ours or transformers'.

    Example:
        >>> config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        >>> Llama(config)(torch.randn(2, 10, 64)).shape  # (B, L, H)
        torch.Size([2, 10, 64])
    """

    token_embedding: nn.Embedding | None = None  # of a pretrained model, for whoever embeds its tokens

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(LlamaLayer(config, number) for number in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def new_cache(self) -> KVCache:
        return KVCache(len(self.layers))

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Hidden states of embedded positions.

        Args:
            x: embeddings (B, L, H).
            positions: (B, L); by default they count on from the cache.
            mask: which of all positions, cached ones included, are valid (B, total); or a 4D attention mask
                (B, 1, L, total). None: there is no padding.
            cache: keys and values of earlier positions, to which these are added.

        Returns:
            (B, L, H)
        """
        before, length = cache.length if cache is not None else 0, x.shape[1]
        if positions is None:
            positions = torch.arange(before, before + length, device=x.device)[None]
        rotary = rotary_embedding(positions, self.config)
        visible = make_attention_mask(mask, length, before + length, x.device)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, rotary, visible, cache, use_reentrant=False)  # pyright: ignore
            else:
                x = layer(x, rotary, visible, cache)
        return self.norm(x)
