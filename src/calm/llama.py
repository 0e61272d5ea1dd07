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
from calm.kv_cache import KVCache, PrefillCache, SlotCache


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

    `mask` (B, total) is false for padding; a four-dimensional one is taken as it is. None means plain causal
    attention, which needs no mask: `length` is 1 or `total`, and there is no padding.
    """
    if mask is not None and mask.ndim == 4:
        return mask
    if mask is None and length in (1, total):
        return None
    places = torch.arange(total, device=device)
    own = places[total - length :, None]  # (length, 1)
    causal = (places <= own)[None, None]
    if mask is None:
        return causal
    return (mask[:, None, None].bool() & causal) | (places == own)  # padding attends to itself: no NaN


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings: (B, L, H) → (B, L, H)."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, config.attention_bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, and values."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, L, d)
            for part in self.project(x)
        )
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        causal = mask is None and x.shape[1] > 1
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: (..., H) → (..., H)."""

    def __init__(self, config: Any):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up projection."""
        return self.gate_proj(x), self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x)
        return self.down_proj(F.silu(gate) * up)


class LlamaLayer(nn.Module):
    """Attention and feed-forward network, each with a residual connection: (B, L, H) → (B, L, H)."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask, cache)
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

    token_embedding: nn.Embedding | None = None  # of a pretrained model; used by ChunkEmbedding

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

    def new_batch(self) -> "LlamaBatch":
        return LlamaBatch(self)

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
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()  # the residual stream; FSDP may have gathered the embedding in bf16
        if positions is None:
            positions = torch.arange(before, before + length, device=x.device)[None]
        rotary = rotary_embedding(positions, self.config)
        mask = make_attention_mask(mask, length, before + length, x.device)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, rotary, mask, cache, use_reentrant=False)  # pyright: ignore
            else:
                x = layer(x, rotary, mask, cache)
        return self.norm(x)


class LlamaBatch:
    """Sequences that a `Llama` decodes together; see `calm.model.Batch`.

    Prompts are left-aligned, so that causal attention needs no mask. On a GPU a decoding step has a static shape: it
    attends to all places of a slot.
    """

    def __init__(self, llama: Llama):
        self.llama = llama
        self.lengths: list[int] = []  # positions of each slot; 0: free
        device = llama.norm.weight.device
        self.cache = SlotCache(len(llama.layers), device)
        self.used = torch.zeros(0, dtype=torch.long, device=device)  # (slots,): 0 if free, else 1

    def add(self, x: Tensor, lengths: list[int], longest: int) -> tuple[list[int], Tensor]:
        cache, count, config = self.cache, len(lengths), self.llama.config
        free = [slot for slot, length in enumerate(self.lengths) if not length]
        slots = [*free, *range(len(self.lengths), len(self.lengths) + count)][:count]
        new = max(0, max(slots) + 1 - len(self.lengths))
        self.lengths += [0] * new
        cache.next, self.used = F.pad(cache.next, (0, new)), F.pad(self.used, (0, new))
        like = x.new_empty(0, config.num_key_value_heads, 0, config.head_dim, dtype=self.llama.norm.weight.dtype)
        cache.allocate(len(self.lengths), max(longest, x.shape[1]), like)
        rows, ends = (torch.tensor(numbers, device=x.device) for numbers in (slots, lengths))
        hidden = self.llama(x, cache=PrefillCache(cache, rows))
        cache.next[rows], self.used[rows] = ends, 1
        for slot, length in zip(slots, lengths, strict=True):
            self.lengths[slot] = length
        return slots, hidden[torch.arange(count, device=x.device), ends - 1]

    def step(self, x: Tensor) -> Tensor:
        cache, static = self.cache, x.device.type == "cuda"
        cache.length = cache.capacity - 1 if static else max(self.lengths)
        mask = None
        if static or min(self.lengths) < max(self.lengths):
            mask = (torch.arange(cache.length + 1, device=x.device) <= cache.next[:, None])[:, None, None]
        hidden = self.llama(x[:, None], cache.next[:, None], mask, cache)[:, 0]
        cache.next += self.used
        self.lengths = [length and length + 1 for length in self.lengths]
        return hidden

    def remove(self, slots: list[int]) -> list[int]:
        """Free some slots. Those at the end are given up; if more than half of the others are free as well, the last
        sequences move to the front, so that a few do not cost as much as many."""
        cache = self.cache
        for slot in slots:
            self.lengths[slot] = 0
        cache.next[slots], self.used[slots] = 0, 0
        used = [slot for slot, length in enumerate(self.lengths) if length]
        kept = list(range(used[-1] + 1 if used else 0))
        if 2 * len(used) < len(kept):
            holes = [slot for slot in kept[: len(used)] if not self.lengths[slot]]
            kept = kept[: len(used)]
            for hole, source in zip(holes, reversed(used), strict=False):
                cache.move(source, hole, self.lengths[source])
                kept[hole] = source
        self.lengths = [self.lengths[slot] for slot in kept]
        cache.next, self.used = cache.next[kept], self.used[kept]
        return kept
