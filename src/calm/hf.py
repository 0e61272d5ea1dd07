"""Adapters to transformers: configs, `PreTrainedModel` classes, Auto classes, and other backbones.

The rest of the package uses plain modules (`model.py`, `autoencoder.py`, `transformer.py`). The classes here are the
same models as `PreTrainedModel`s, and any causal `AutoModel` as a backbone.
"""

import importlib
import warnings
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.generic import ModelOutput

from calm.autoencoder import Autoencoder, AutoencoderConfig, chunk_mask
from calm.checkpoint import (
    CONFIG_FILE,
    KINDS,
    RENAMED_WEIGHTS,
    check_finite,
    check_layers,
    model_type,
    read_json,
    write_card,
)
from calm.errors import CalmWarning, ConfigError, UserError, did_you_mean, one_line
from calm.heads.softmax import SoftmaxHead
from calm.kv_cache import KVCache
from calm.llama import Llama, LlamaConfig
from calm.model import Calm, CalmProperties, calm_fields
from calm.noise import RowNoise
from calm.scores.vocabulary import VocabularySubset

IGNORE_INDEX = -100  # labels that transformers leaves out of a loss
DEFAULT_NEW_TOKENS = 128


# ----------------------------------------------------------------------------------------------------------- configs


class ChunkAutoencoderConfig(PretrainedConfig):
    """Config of a `ChunkAutoencoder`. Its fields and defaults are those of `calm.autoencoder.AutoencoderConfig`.

    Example:
        >>> ChunkAutoencoderConfig(vocab_size=4096, chunk_size=4, latent_size=64)
    """

    model_type = "calm-autoencoder"

    def __init__(self, **kwargs: Any):
        own = {name: kwargs.pop(name) for name in AutoencoderConfig.model_fields if name in kwargs}
        self.__dict__.update(AutoencoderConfig(**own).model_dump())
        super().__init__(**kwargs)


class CalmConfig(CalmProperties, PretrainedConfig):
    """Config of a `CalmForCausalLM`.

    Args:
        backbone_config: config of any causal Transformer, or its fields (`model_type`: llama by default).
        autoencoder_config: a `ChunkAutoencoderConfig`, or its fields.
        model_input: "discrete", "continuous", or "both" (Table 5 of the paper).
        head: "energy", "flow", "mean-flow", "diffusion", "probit", or "chain".
        num_head_layers: by default a quarter of the backbone's layers.
        kwargs: fields of the head, such as `num_model_samples`, `alpha`, and `noise_size` of the energy head.

    Example:
        >>> CalmConfig({"hidden_size": 256, "num_hidden_layers": 4}, {"vocab_size": 4096}, head="energy")
    """

    model_type = "calm"
    sub_configs = {"backbone_config": AutoConfig, "autoencoder_config": ChunkAutoencoderConfig}  # noqa: RUF012  # pyright: ignore

    def __init__(
        self,
        backbone_config: PretrainedConfig | dict[str, Any] | None = None,
        autoencoder_config: ChunkAutoencoderConfig | dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        if not isinstance(autoencoder_config, ChunkAutoencoderConfig):
            autoencoder_config = ChunkAutoencoderConfig(**(autoencoder_config or {}))
        if not isinstance(backbone_config, PretrainedConfig):
            backbone_config = make_backbone_config(backbone_config or {}, autoencoder_config.vocab_size)  # pyright: ignore
        own, kwargs = calm_fields(autoencoder_config, backbone_config, **kwargs)
        self.__dict__.update(own)
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    def get_text_config(self, *args, **kwargs):
        """The backbone's config, which transformers uses for attention and caches."""
        return self.backbone_config


def make_backbone_config(backbone: dict[str, Any], vocab_size: int) -> PretrainedConfig:
    """A backbone's config from its `model_type` (Llama by default) and fields, which must be known ones."""
    given = {"model_type": "llama", "vocab_size": vocab_size, **backbone}
    kind = given.pop("model_type")
    try:
        default = AutoConfig.for_model(kind)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"backbone: transformers has no model_type {kind!r}{did_you_mean(kind, CONFIG_MAPPING)}"
        ) from error
    known = {*default.to_dict(), *default.attribute_map, "rope_theta", "rope_scaling"}
    for field in given:
        if field not in known:
            raise ConfigError(f"backbone: {kind} has no field {field!r}{did_you_mean(field, known)}")
    try:
        return AutoConfig.for_model(kind, **given)
    except Exception as error:  # transformers' configs raise errors of several libraries
        raise ConfigError(f"backbone: {kind} cannot be built: {one_line(error)}") from error


# --------------------------------------------------------------------------------------------------------- backbones


class HFCache:
    """transformers' cache behind the interface of `calm.llama.KVCache`."""

    def __init__(self) -> None:
        self.cache: Any = DynamicCache()

    @property
    def length(self) -> int:
        return int(self.cache.get_seq_length())

    def crop(self, length: int) -> None:
        if self.length > length:
            self.cache.crop(length - self.length)

    def select(self, rows: Tensor, first: int = 0) -> None:
        """Keep some rows, from position `first` on."""
        for layer in self.cache.layers:
            layer.keys, layer.values = (states[rows, :, first:] for states in (layer.keys, layer.values))

    def merge(self, other: "HFCache") -> None:
        """Add the rows of another cache; the shorter one is padded at its front."""
        length = max(self.length, other.length)

        def join(*parts: Tensor) -> Tensor:
            return torch.cat([F.pad(part, (0, 0, length - part.shape[-2], 0)) for part in parts])

        for layer, new in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys, layer.values = join(layer.keys, new.keys), join(layer.values, new.values)


class HFBatch:
    """Sequences that a model of transformers decodes together; see `calm.model.Batch`.

    Its cache has one length for all rows. So rows are right-aligned and shorter ones masked, and keys and values are
    copied when sequences are added or removed.
    """

    def __init__(self, model: "_HFModule"):
        self.model, self.cache, self.lengths = model, HFCache(), []  # positions of each row

    def add(self, x: Tensor, lengths: list[int], longest: int) -> tuple[list[int], Tensor]:
        size, ends = x.shape[1], torch.tensor(lengths, device=x.device)[:, None]
        places = torch.arange(size, device=x.device) - size + ends  # (n, L): negative in front of a prompt
        rows = torch.arange(len(x), device=x.device)[:, None]
        cache = HFCache()
        hidden = self._forward(x[rows, places % size], lengths, size, places.clamp(min=0), cache)
        slots = list(range(len(self.lengths), len(self.lengths) + len(x)))
        if self.lengths:
            self.cache.merge(cache)
        else:
            self.cache = cache
        self.lengths += lengths
        return slots, hidden

    def step(self, x: Tensor) -> Tensor:
        positions = torch.tensor(self.lengths, device=x.device)[:, None]
        self.lengths = [length + 1 for length in self.lengths]
        return self._forward(x[:, None], self.lengths, max(self.lengths), positions, self.cache)

    def _forward(self, x: Tensor, lengths: list[int], total: int, positions: Tensor, cache: HFCache) -> Tensor:
        """Hidden state of the last position: (B, L, H) → (B, H)."""
        mask = None
        if min(lengths) < total:
            mask = torch.arange(total, device=x.device) >= total - torch.tensor(lengths, device=x.device)[:, None]
        return self.model(x, positions, mask, cache)[:, -1]

    def remove(self, slots: list[int]) -> list[int]:
        kept = [slot for slot in range(len(self.lengths)) if slot not in slots]
        before = max(self.lengths)
        self.lengths = [self.lengths[slot] for slot in kept]
        if kept:
            self.cache.select(torch.tensor(kept), before - max(self.lengths))
        return kept


class _HFModule(nn.Module):
    """Wraps a transformers model; its weights keep their names."""

    wrapped: Any  # a name that none of its children has

    def __init__(self, model: Any):
        super().__init__()
        object.__setattr__(self, "wrapped", model)  # not as a submodule: its children and parameters become ours
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, kind, getattr(model, kind))
        self.config = model.config

    @property
    def layers(self) -> nn.ModuleList:
        """The longest `ModuleList` that is not inside another one, as lists of experts are."""
        lists = {path: part for path, part in self.wrapped.named_modules() if isinstance(part, nn.ModuleList)}
        outer = [part for path, part in lists.items() if not any(path.startswith(f"{other}.") for other in lists)]
        return max(outer, key=len, default=nn.ModuleList())

    @property
    def gradient_checkpointing(self) -> bool:
        return self.wrapped.is_gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        (self.wrapped.gradient_checkpointing_enable if enabled else self.wrapped.gradient_checkpointing_disable)()

    def train(self, mode: bool = True) -> Any:
        self.wrapped.train(mode)
        return super().train(mode)

    def new_cache(self) -> HFCache:
        return HFCache()

    def new_batch(self) -> HFBatch:
        return HFBatch(self)

    def call(self, x: Tensor, positions: Tensor | None, mask: Tensor | None, cache: HFCache | None) -> Any:
        """The wrapped model's output for embeddings (B, L, H)."""
        if mask is not None and mask.ndim == 4:  # an additive mask, which every attention implementation supports
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
        elif mask is not None:
            mask = mask.long()
        return self.wrapped(
            inputs_embeds=x,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=None if cache is None else cache.cache,
            use_cache=cache is not None,
        )


class HFBackbone(_HFModule):
    """Any causal model of transformers as a backbone.

    Args:
        model: an `AutoModel`. Its token embedding is moved out: the chunk embedding uses it, or nothing does.
    """

    token_embedding: Any

    def __init__(self, model: Any):
        embedding = model.get_input_embeddings()
        model.set_input_embeddings(None)
        super().__init__(model)
        object.__setattr__(self, "token_embedding", embedding)

    def reset_parameters(self) -> None:
        """transformers has initialized it."""

    def forward(
        self, x: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, cache: HFCache | None = None
    ) -> Tensor:
        return self.call(x, positions, mask, cache).last_hidden_state


def build_transformer(auto_class: Any, config: PretrainedConfig) -> Any:
    """A new causal model; `auto_class` is AutoModel or AutoModelForCausalLM."""
    kind = config.model_type
    try:
        model = auto_class.from_config(config, trust_remote_code=False)
        model.get_input_embeddings()
    except Exception as error:  # transformers raises errors of many types for an invalid config
        raise ConfigError(f"a backbone {kind!r} cannot be built: {one_line(error)}") from error
    if any(getattr(part, "is_causal", True) is False for part in model.modules()):
        raise ConfigError(f"a backbone {kind!r} is bidirectional; a language model needs a causal one")
    return model


def build_backbone(config: PretrainedConfig | dict[str, Any]) -> Any:
    """A backbone with new weights: our Llama, or any other model of transformers."""
    if isinstance(config, dict):
        config = AutoConfig.for_model(**{"model_type": "llama", **config})
    if LlamaConfig.describes(config.to_dict()):
        return Llama(config)
    return HFBackbone(build_transformer(transformers.AutoModel, config))


def load_backbone(directory: Path, vocab_size: int) -> Any:
    """A pretrained language model without its output layer, as a backbone.

    Its token embedding is `token_embedding`, with at least `vocab_size` rows.
    """
    if (kind := model_type(directory)) in KINDS:
        raise UserError(f"{directory} holds {KINDS[kind]}, not a pretrained Transformer")
    model = _from_pretrained(directory, transformers.AutoModel, unexpected_allowed=True)
    if model.get_input_embeddings().num_embeddings < vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)  # room for added special tokens
    if not LlamaConfig.describes(model.config.to_dict()):
        return HFBackbone(model)
    backbone = Llama(LlamaConfig(**model.config.to_dict()))
    object.__setattr__(backbone, "token_embedding", model.get_input_embeddings())  # not registered: see Calm.build
    model.set_input_embeddings(None)
    backbone.load_state_dict(model.state_dict())
    return backbone


def _from_pretrained(directory: Path, cls: Any, unexpected_allowed: bool = False) -> Any:
    """Load a model in fp32; missing, mismatched and, unless allowed, unexpected weights are an error.

    Code in the directory is not executed, and the user is not asked whether to.
    """
    check_layers(read_json(directory / CONFIG_FILE), directory)
    options = {"dtype": torch.float32, "output_loading_info": True, "trust_remote_code": False}
    try:
        model, info = cls.from_pretrained(directory, **options)
    except Exception as error:  # transformers and safetensors raise errors of many types for a broken directory
        raise UserError(f"the model in {directory} cannot be read: {one_line(error)}") from error
    kinds = ("missing_keys", "mismatched_keys", *(() if unexpected_allowed else ("unexpected_keys",)))
    if wrong := [name for kind in kinds for name in info[kind]]:
        raise UserError(f"the weights in {directory} do not fit their config.json: {', '.join(map(str, wrong[:3]))}")
    check_finite(dict(model.named_parameters()), directory)
    return model


# ------------------------------------------------------------------------------------ other Transformers than Llamas


class HFTransformer(_HFModule):
    """Any causal language model of transformers behind the interface of `calm.transformer.Transformer`.

    As a backbone it returns logits instead of hidden states, since some architectures scale or cap logits after the
    output projection.
    """

    chunk_size = 1
    front_padding = True
    fsdp_methods = ("logits",)

    def __init__(self, model: Any):
        super().__init__(model)
        self.config.architectures = [type(model).__name__]

    @property
    def backbone(self) -> "HFTransformer":
        return self

    @property
    def head(self) -> SoftmaxHead:
        return SoftmaxHead(self.wrapped.get_output_embeddings(), project=nn.Identity())

    @property
    def device(self) -> torch.device:
        return self.wrapped.device

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size

    def embed(self, chunks: Tensor) -> Tensor:
        return self.wrapped.get_input_embeddings()(chunks[..., 0])

    def logits(self, tokens: Tensor) -> Tensor:
        return self.wrapped(input_ids=tokens, use_cache=False).logits

    def config_dict(self) -> dict[str, Any]:
        return self.config.to_dict()

    def forward(
        self,
        chunks: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: HFCache | None = None,
        *,
        loss_mask: Tensor | None = None,
        noise: RowNoise | None = None,
        num_chunks: float | Tensor | None = None,
    ) -> Any:
        """Logits of embeddings (B, L, H); of token ids (B, L, 1) the training loss, as in `Transformer.forward`."""
        if chunks.is_floating_point():
            return self.call(chunks, positions, mask, cache).logits
        labels = chunks[:, 1:, 0]
        counted = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask[:, 1:].float()
        logits = self.wrapped(input_ids=chunks[:, :-1, 0], use_cache=False).logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return {
            "loss": (losses * counted.flatten()).sum()
            / (counted.sum().clamp(min=1) if num_chunks is None else num_chunks)
        }

    def fsdp_units(self) -> list[tuple[nn.Module, bool]]:
        return [(layer, True) for layer in self.layers]

    def fsdp_replicated(self) -> list[nn.Module]:
        return []

    def compile_units(self) -> list[nn.Module]:
        return list(self.layers)

    def quantizable(self) -> list[nn.Module]:
        return [self.wrapped.base_model]


def load_hf_transformer(directory: Path) -> HFTransformer:
    return HFTransformer(_from_pretrained(directory, transformers.AutoModelForCausalLM)).eval()


def build_hf_transformer(config: PretrainedConfig) -> HFTransformer:
    return HFTransformer(build_transformer(transformers.AutoModelForCausalLM, config))


# ------------------------------------------------------------------------------------------------------------ models


@dataclass
class AutoencoderOutput(ModelOutput):
    loss: Tensor | None = None  # reconstruction + kl_weight · KL
    reconstruction: Tensor | None = None  # nats per chunk
    kl: Tensor | None = None  # nats per chunk, floored


@dataclass
class CalmOutput(ModelOutput):
    loss: Tensor | None = None
    last_hidden_state: Tensor | None = None  # (B, L, H), if there are no labels
    past_key_values: KVCache | HFCache | None = None


class _PreTrained(PreTrainedModel):
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True


class ChunkAutoencoder(Autoencoder, _PreTrained):
    """The autoencoder of §2 as a model of transformers: K tokens ↔ one vector.

    Args:
        config: a `ChunkAutoencoderConfig`.

    Example:
        >>> autoencoder = ChunkAutoencoder(ChunkAutoencoderConfig(vocab_size=4096, chunk_size=4))
        >>> autoencoder.tokens(autoencoder.encode(chunks).mean)  # chunks (..., K) → (..., K)
    """

    config_class = ChunkAutoencoderConfig
    config: ChunkAutoencoderConfig

    def __init__(self, config: ChunkAutoencoderConfig):
        PreTrainedModel.__init__(self, config)
        self.build(config)
        self.post_init()
        self.reset_parameters()

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        noise: RowNoise | None = None,
        vocabulary: VocabularySubset | None = None,
        num_chunks: float | Tensor | None = None,
    ) -> AutoencoderOutput:
        """Training loss on rows of whole chunks (B, T). Chunks without a valid token do not count."""
        size = self.config.chunk_size  # pyright: ignore[reportAttributeAccessIssue]
        mask = None if attention_mask is None else chunk_mask(attention_mask, size)
        output = super().forward(input_ids.unflatten(1, (-1, size)), mask, noise, vocabulary, num_chunks)
        return AutoencoderOutput(**output)  # pyright: ignore[reportArgumentType]


UNSUPPORTED = {
    "num_beams": "beam search needs probabilities of texts, which a CALM model does not have",
    "do_sample": "a CALM model always samples; a low temperature, such as 0.1, comes close to greedy decoding",
    "output_logits": "a CALM model has no logits",
    "output_scores": "a CALM model has no scores of tokens",
    "logprobs": "log-probabilities exist with the method 'mixture' only; calm.generate.sampler returns them",
    "repetition_penalty": "a CALM model has no token probabilities that could be lowered",
}


class CalmForCausalLM(Calm, _PreTrained):
    """The language model of §3 as a model of transformers.

    Args:
        config: a `CalmConfig`.

    Example:
        >>> model = CalmForCausalLM(CalmConfig({"hidden_size": 256}, {"vocab_size": 4096}))
        >>> loss = model(input_ids, labels=input_ids).loss                   # (B, T), T a multiple of K
        >>> model.generate(input_ids, max_new_tokens=32, temperature=0.5, eos_token_id=1, pad_token_id=2)
    """

    config_class = CalmConfig
    config: CalmConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # transformers' Trainer then averages over accumulated batches itself
    _no_split_modules = ["Autoencoder"]  # noqa: RUF012

    def __init__(self, config: CalmConfig):
        PreTrainedModel.__init__(self, config)
        self.build(config, build_backbone(config.backbone_config), Autoencoder(config.autoencoder_config))
        self.post_init()
        self.reset_parameters()
        self.freeze_autoencoder()

    def _init_weights(self, module: nn.Module) -> None:
        """Called for what a directory lacks: weights, and buffers of other backbones, which can compute them."""
        backbone: Any = self.backbone
        if isinstance(backbone, HFBackbone):
            backbone.wrapped._init_weights(backbone.wrapped if module is backbone else module)
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As for any model; also loads directories that older versions saved."""
        mapping = {f"^{old}$": new for old, new in RENAMED_WEIGHTS.items()}
        loaded: Any = super().from_pretrained(
            *args, key_mapping=mapping | (kwargs.pop("key_mapping", None) or {}), **kwargs
        )
        (loaded[0] if isinstance(loaded, tuple) else loaded).freeze_autoencoder()  # transformers unfreezes everything
        return loaded

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As for any model, with a model card if there is none yet."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_card(self, Path(save_directory))

    def get_input_embeddings(self) -> Any:
        return self.chunk_embedding.tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.chunk_embedding.tokens = value

    def chunks(self, input_ids: Tensor) -> Tensor:
        """(B, T) → (B, L, K)."""
        size = self.config.chunk_size
        if input_ids.shape[-1] % size:
            raise ConfigError(
                f"the model reads whole chunks of {size} tokens, and {input_ids.shape[-1]} is not a multiple of "
                f"{size}; pad with the tokenizer's pad token (collators have pad_to_multiple_of={size})"
            )
        return input_ids.unflatten(-1, (-1, size))

    def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        stop: Many[Many[int]] = (),
        generator: torch.Generator | None = None,
        streamer: Any = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Continue prompts, with the interface of transformers' `generate`.

        Args:
            input_ids: prompts (B, T).
            attention_mask: (B, T), 0 for padding, which may be before or after a prompt.
            stop: sequences of token ids that end a continuation; they are not part of it.
            streamer: receives the prompt, then the chunks as they are generated; for a single prompt only.
            options: fields of `SamplingParams`: temperature, num_candidates, method, and so on.

        Returns:
            Prompts with their continuations (B, T + new), without end tokens; shorter ones are padded.
        """
        from calm.generate.engine import Engine, Sequence

        params = _sampling_params(options)
        eos, *other_ends = self._special_ids("eos_token_id", eos_token_id)
        pad = self._special_ids("pad_token_id", pad_token_id)[0]
        stops = [*_token_lists(stop), *([other] for other in other_ends)]
        if input_ids.ndim != 2 or not len(input_ids):
            raise ConfigError(f"input_ids should have the shape (B, T), not {tuple(input_ids.shape)}")
        _check_shape("attention_mask", attention_mask, input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if streamer is not None and len(input_ids) > 1:
            raise ConfigError(f"a streamer takes one text, not {len(input_ids)}")
        prompts = [row[valid.bool()].tolist() for row, valid in zip(input_ids, mask, strict=True)]
        device = None if generator is None else generator.device
        seeds = torch.randint(2**62, (len(prompts),), generator=generator, device=device).tolist()
        sequences = [
            Sequence(prompt, seed, max_new_tokens, params) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        engine = Engine(self, eos, pad)
        engine.add(sequences)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        streamed = 0
        while engine.waiting or engine.running:
            for sequence, _, _ in engine.step():
                if (end := _find_stop(sequence.output_ids, stops)) is not None:
                    sequence.output_ids = sequence.output_ids[:end]
                    engine.remove([sequence])
            if streamer is not None:
                output = sequences[0].output_ids
                certain = len(output) - (_partial_stop(output, stops) if engine.running else 0)
                if certain > streamed:
                    streamer.put(torch.tensor(output[streamed:certain]))
                    streamed = certain
        if streamer is not None:
            streamer.end()
        if warning := engine.stats.warning(sequences[0].params):
            warnings.warn(warning, CalmWarning, stacklevel=2)
        outputs = pad_sequence([torch.tensor(s.output_ids, dtype=torch.long) for s in sequences], True, pad)
        return torch.cat([input_ids, outputs.to(input_ids.device)], dim=1)

    def _special_ids(self, name: str, given: int | list[int] | None) -> list[int]:
        """The ids of a special token; a config.json may contain several."""
        ids = given if given is not None else getattr(self.config, name, None)
        if ids is None:
            raise ConfigError(f"the model's config.json has no {name}; pass it to generate")
        return list(ids) if isinstance(ids, list | tuple) else [int(ids)]

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: KVCache | HFCache | None = None,
        noise: RowNoise | None = None,
        vocabulary: VocabularySubset | None = None,
        num_chunks: float | Tensor | None = None,
    ) -> CalmOutput:
        """The training loss, or hidden states if there are no labels.

        Args:
            input_ids: (B, T), T a multiple of K.
            labels: the ids themselves; -100 is ignored. A chunk counts in the loss if any of its labels does and the
                chunk before it is not padding.
            attention_mask: (B, T), 0 for padding.
            past_key_values: from `model.backbone.new_cache()`.
            noise: one generator per row, to repeat a loss exactly.
        """
        _check_shape("labels", labels, input_ids)
        _check_shape("attention_mask", attention_mask, input_ids)
        if labels is not None and input_ids.shape[-1] < 2 * self.config.chunk_size:
            raise ConfigError(
                f"a loss needs at least two chunks of {self.config.chunk_size} tokens, one to read and one to predict"
            )
        chunks, size = self.chunks(input_ids), self.config.chunk_size
        mask = None if attention_mask is None else chunk_mask(attention_mask, size)
        if labels is None:
            hidden = self.hidden_states(chunks, mask, past_key_values, noise=noise)  # pyright: ignore
            return CalmOutput(last_hidden_state=hidden, past_key_values=past_key_values)  # pyright: ignore
        loss_mask = chunk_mask(labels != IGNORE_INDEX, size)
        if mask is not None:
            loss_mask[:, 1:] *= mask[:, 1:] * mask[:, :-1]
        output = super().forward(chunks, loss_mask, mask, noise, vocabulary, num_chunks)
        return CalmOutput(loss=output["loss"])  # pyright: ignore[reportArgumentType]


def _check_shape(name: str, given: Tensor | None, input_ids: Tensor) -> None:
    if given is not None and given.shape != input_ids.shape:
        raise ConfigError(f"{name} of shape {tuple(given.shape)} for input_ids of {tuple(input_ids.shape)}")


def _sampling_params(options: dict[str, Any]) -> Any:
    from calm.generate.sampler import SamplingParams

    known = [field.name for field in fields(SamplingParams)]
    for name, value in options.items():
        if name in UNSUPPORTED and not (name == "do_sample" and value):
            raise ConfigError(f"generate does not support {name}: {UNSUPPORTED[name]}")
        if name not in known and name != "do_sample":
            raise ConfigError(f"generate has no option {name!r}{did_you_mean(name, known)}")
    return SamplingParams(**{name: value for name, value in options.items() if name != "do_sample"})


def _token_lists(stop: Any) -> list[list[int]]:
    if isinstance(stop, str) or not all(isinstance(ids, list | tuple) for ids in stop):
        raise ConfigError("stop takes lists of token ids, as tokenizer.encode returns; calm generate takes strings")
    if not all(stop):
        raise ConfigError("a stop sequence must not be empty")
    return [list(ids) for ids in stop]


def _find_stop(ids: list[int], stops: list[list[int]]) -> int | None:
    """The position of the first stop sequence."""
    return next((i for i in range(len(ids)) if any(ids[i : i + len(stop)] == stop for stop in stops)), None)


def _partial_stop(ids: list[int], stops: list[list[int]]) -> int:
    """The number of tokens at the end that may be the beginning of a stop sequence."""
    return max((n for stop in stops for n in range(1, len(stop)) if ids[-n:] == stop[:n]), default=0)


# ------------------------------------------------------------------------------------------------------ Auto classes


def register_configs() -> None:
    """Called when transformers' AutoConfig is imported (see calm/_auto.py)."""
    for config in (ChunkAutoencoderConfig, CalmConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)


def register_models() -> None:
    """Called when transformers' AutoModel classes are imported."""
    transformers.AutoModel.register(ChunkAutoencoderConfig, ChunkAutoencoder, exist_ok=True)
    transformers.AutoModel.register(CalmConfig, CalmForCausalLM, exist_ok=True)
    transformers.AutoModelForCausalLM.register(CalmConfig, CalmForCausalLM, exist_ok=True)


register_configs()
importlib.import_module("transformers.models.auto.modeling_auto")  # which calls register_models
