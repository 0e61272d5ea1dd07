"""The continuous autoregressive language model of §3, in one file.

    chunks (B, L, K) → chunk embedding → backbone → hidden (B, L, H) → head → next chunk

Position i predicts chunk i + 1. The head decides what "predict" means: a vector head scores and samples latents of the
frozen autoencoder, the chain head scores and samples tokens.
"""

from typing import Any, Literal, NamedTuple, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from calm.autoencoder import Autoencoder, AutoencoderConfig, Posterior
from calm.errors import ConfigError, did_you_mean
from calm.heads import HEADS, Head
from calm.heads.base import check_finite
from calm.kv_cache import KVCache
from calm.llama import Llama, LlamaConfig, check_positions
from calm.noise import NoiseSource, RowNoise, draw_normal
from calm.scores.vocabulary import VocabularySubset

MODEL_INPUTS = ("discrete", "continuous", "both")
RENAMED = {"own_words": "untied_lm_head", "knows_fill": "front_padding"}  # config.json of version 0.1.0.dev0


def calm_fields(
    autoencoder_config: Any,
    backbone_config: Any,
    *,
    model_input: Literal["discrete", "continuous", "both"] = "discrete",
    head: str = "energy",
    num_head_layers: int | None = None,  # by default a quarter of the backbone's layers
    front_padding: bool = True,  # whether training has seen padding at the front of sequences
    **fields: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The validated fields of a model's config, and the remaining, unrecognized fields.

    Fields of the chosen head get their defaults; fields of other heads are dropped.
    """
    for old, new in RENAMED.items():
        if old in fields:
            fields[new] = fields.pop(old)
    front_padding = fields.pop("front_padding", front_padding)
    for name, value, known in (("head", head, HEADS), ("model_input", model_input, MODEL_INPUTS)):
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, not {value!r}{did_you_mean(value, known)}")
    if num_head_layers is None:
        num_head_layers = max(1, backbone_config.num_hidden_layers // 4)
    if num_head_layers < 1:
        raise ConfigError(f"num_head_layers must be at least 1, not {num_head_layers}")
    chosen, others = head_fields(head, fields)
    attributes = {
        "autoencoder_config": autoencoder_config,
        "backbone_config": backbone_config,
        "model_input": model_input,
        "head": head,
        "num_head_layers": num_head_layers,
        "front_padding": front_padding,
        **chosen,
    }
    return attributes, others


def head_fields(head: str, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a head with their defaults, and what belongs to no head at all."""
    own = HEADS[head].Config.model_fields
    try:
        chosen = HEADS[head].Config(**{name: value for name, value in fields.items() if name in own})
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        if problem["loc"]:
            message = f"{problem['loc'][0]}: {message[0].lower() + message[1:]}, not {problem['input']!r}"
        raise ConfigError(message) from error
    known = {name for kind in HEADS.values() for name in kind.Config.model_fields}
    return chosen.model_dump(), {name: value for name, value in fields.items() if name not in known}


class CalmProperties:
    """Sizes that a config takes from its parts."""

    autoencoder_config: Any
    backbone_config: Any

    @property
    def vocab_size(self) -> int:
        return self.autoencoder_config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.backbone_config.hidden_size

    @property
    def chunk_size(self) -> int:
        return self.autoencoder_config.chunk_size

    @property
    def latent_size(self) -> int:
        return self.autoencoder_config.latent_size


class PlainCalmConfig(CalmProperties):
    """The config of a model without transformers; `calm.CalmConfig` has the same fields."""

    model_type = "calm"
    head: str
    front_padding: bool

    def __init__(
        self,
        backbone_config: Any,
        autoencoder_config: Any,
        *,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **fields: Any,
    ):
        if isinstance(backbone_config, dict):
            backbone_config = LlamaConfig(**backbone_config)
        if isinstance(autoencoder_config, dict):
            known = AutoencoderConfig.model_fields
            autoencoder_config = AutoencoderConfig(**{n: v for n, v in autoencoder_config.items() if n in known})
        attributes, _ = calm_fields(autoencoder_config, backbone_config, **fields)
        self.__dict__.update(attributes)
        self.eos_token_id, self.pad_token_id = eos_token_id, pad_token_id

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        parts = {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in vars(self).items()}
        return {"architectures": ["CalmForCausalLM"], "model_type": self.model_type, **parts}


class ChunkEmbedding(nn.Module):
    """The backbone's input for a chunk (Table 5 of the paper, "Model Input").

    discrete     embeddings of its K tokens, compressed by a two-layer MLP: the paper's choice
    continuous   a linear map of its latent vector
    both         their sum
    """

    def __init__(self, config: Any, tokens: nn.Embedding):
        super().__init__()
        size, kind = config.hidden_size, config.model_input
        self.tokens = self.compress = self.latent = None
        if kind != "continuous":
            self.tokens = tokens
            self.compress = nn.Sequential(
                nn.Linear(config.chunk_size * tokens.embedding_dim, 2 * size),
                nn.SiLU(),
                nn.Linear(2 * size, size),
                nn.LayerNorm(size, eps=1e-6),
            )
        if kind != "discrete":
            self.latent = nn.Linear(config.latent_size, size)

    def reset_parameters(self, std: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
            if isinstance(module, nn.Linear | nn.LayerNorm):
                nn.init.zeros_(module.bias)

    @property
    def reads_latents(self) -> bool:
        return self.latent is not None

    def forward(self, chunks: Tensor, latents: Tensor | None = None) -> Tensor:
        """Ids (..., K) and, if they are read, latents (..., Z) → (..., H)."""
        parts = []
        if self.tokens is not None and self.compress is not None:
            parts.append(self.compress(self.tokens(chunks).flatten(-2)))
        if self.latent is not None:
            assert latents is not None
            parts.append(self.latent(latents))
        return sum(parts[1:], parts[0])


class Batch(Protocol):
    """Sequences that a backbone decodes together: `backbone.new_batch()`. Each has a slot, a row of the tensors."""

    def add(self, x: Tensor, lengths: list[int], longest: int) -> tuple[list[int], Tensor]:
        """Prefill the embedded prompts of new sequences.

        Args:
            x: (n, L, H); shorter prompts end with padding.
            lengths: positions of each prompt.
            longest: positions that a sequence may grow to.

        Returns:
            Their slots, and the hidden state of each prompt's last position (n, H).
        """
        ...

    def step(self, x: Tensor) -> Tensor:
        """Decode one position of every sequence: (slots, H) → (slots, H). Rows of free slots mean nothing."""
        ...

    def remove(self, slots: list[int]) -> list[int]:
        """Free some slots. Returns which of the former slots each slot is now."""
        ...


class LanguageModel(Protocol):
    """What generation and evaluation ask of a model: a CALM, or a Transformer, whose chunks have one token."""

    config: Any

    @property
    def backbone(self) -> Any: ...  # (embeddings, positions, mask, cache) → hidden states; new_cache(), new_batch()

    @property
    def head(self) -> Head: ...

    @property
    def chunk_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def front_padding(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    def embed(self, chunks: Tensor) -> Tensor:
        """Embeddings of chunks: ids (..., K) → (..., H)."""
        ...


class TeacherSamples(NamedTuple):
    """Chunks that a teacher samples at some positions, as targets of the head."""

    samples: Tensor  # ids (M, B, P, K): after every `stride`-th chunk
    finite: Tensor  # whether the teacher's output was finite, a scalar; if not, the loss is NaN
    stride: int
    weight: float  # of their loss; that of the true chunks has the rest


class Calm(nn.Module):
    """Continuous autoregressive language model: one backbone step per chunk of K tokens.

    Args:
        config: a `PlainCalmConfig`, or transformers' `calm.CalmConfig`.
        backbone: by default a Llama; see `calm.hf.build_backbone` for others.

    Example:
        >>> loss = model(chunks)["loss"]                              # chunks (B, L, K)
        >>> hidden = model.hidden_states(chunks)                      # (B, L, H)
        >>> next_chunks = model.head.propose(hidden, 8).tokens()      # (8, B, L, K)
    """

    config: Any
    head: Head
    fsdp_methods = ("predict",)  # called from outside of `forward`

    def __init__(self, config: Any, backbone: nn.Module | None = None):
        super().__init__()
        self.config = config
        self.build(config, backbone or Llama(config.backbone_config), Autoencoder(config.autoencoder_config))
        self.reset_parameters()
        self.freeze_autoencoder()

    def build(self, config: Any, backbone: Any, autoencoder: Autoencoder) -> None:
        """Add the submodules. Separate from `__init__` for the classes of transformers in `hf.py`, which call it."""
        tokens = backbone.token_embedding  # a pretrained backbone brings its own
        if tokens is None:
            tokens = nn.Embedding(config.backbone_config.vocab_size, config.backbone_config.hidden_size)
        self.backbone = backbone
        self.chunk_embedding = ChunkEmbedding(config, tokens)
        self.head = HEADS[config.head](config, autoencoder)
        self.autoencoder = autoencoder

    def reset_parameters(self) -> None:
        self.chunk_embedding.reset_parameters(getattr(self.config.backbone_config, "initializer_range", 0.02))
        for part in (self.backbone, self.head, self.autoencoder):
            part.reset_parameters()

    def freeze_autoencoder(self) -> None:
        self.autoencoder.requires_grad_(False)
        self.autoencoder.eval()

    def load_autoencoder(self, autoencoder: nn.Module) -> None:
        """Take the weights of a trained autoencoder."""
        self.autoencoder.load_state_dict(autoencoder.state_dict())
        self.head.initialize_from(self.autoencoder)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.autoencoder.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        super().requires_grad_(requires_grad)
        self.freeze_autoencoder()
        return self

    @property
    def device(self) -> torch.device:
        return self.autoencoder.embedding.weight.device

    @property
    def chunk_size(self) -> int:
        return self.config.chunk_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def front_padding(self) -> bool:
        return self.config.front_padding

    @torch.no_grad()
    def posterior(self, chunks: Tensor) -> Posterior:
        """Posterior of chunks (..., K) under the frozen autoencoder."""
        return self.autoencoder.encode(chunks)

    def embed(self, chunks: Tensor, latents: Tensor | None = None, noise: NoiseSource = None) -> Tensor:
        """The backbone's input for chunks (..., K): (..., H).

        A model that reads latents takes those given (..., Z), or posterior means; in training it samples them.
        """
        if self.chunk_embedding.reads_latents and latents is None:
            posterior = self.posterior(chunks)
            latents = posterior.mean
            if self.training:
                latents = posterior.sample(draw_normal(noise, latents, 1, self.config.latent_size)[0])
        return self.chunk_embedding(chunks, latents)

    def hidden_states(
        self,
        chunks: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        latents: Tensor | None = None,
        noise: NoiseSource = None,
    ) -> Tensor:
        """Hidden states of chunks (B, L, K): (B, L, H). `mask` (B, L) is 0 for padding; a cache is appended to."""
        before = cache.length if cache is not None else 0
        check_positions(self.config.backbone_config, chunks.shape[1] + before, "chunks")
        return self.backbone(self.embed(chunks, latents, noise), mask=mask, cache=cache)

    def predict(self, chunks: Tensor, num_samples: int, noise: NoiseSource = None) -> tuple[Tensor, Tensor, Posterior]:
        """Samples of every chunk but the first, given the true chunks before it.

        Returns:
            Latents (N, B, L-1, Z), tokens (N, B, L-1, K), and the posterior of the true chunks.
        """
        proposals = check_finite(self.head.propose(self.hidden_states(chunks[:, :-1]), num_samples, noise))
        return proposals.latents(), proposals.tokens(), self.posterior(chunks[:, 1:])

    def forward(
        self,
        chunks: Tensor,
        loss_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        noise: RowNoise | None = None,
        vocabulary: VocabularySubset | None = None,
        num_chunks: float | Tensor | None = None,
        teacher_samples: TeacherSamples | None = None,
    ) -> dict[str, Tensor]:
        """Training loss: the head's loss for every chunk but the first, given the chunks before it.

        Args:
            chunks: ids (B, L, K).
            loss_mask: 1 for the chunks that count in the loss (B, L); all by default.
            attention_mask: 1 for the chunks that the backbone may attend to (B, L); all by default.
            noise: one generator per row.
            vocabulary: tokens to estimate softmaxes from, for heads with token probabilities.
            num_chunks: number of chunks to average over, if the batch is computed in parts.
            teacher_samples: further targets, for distillation.
        """
        noise = noise or RowNoise.fresh(len(chunks), chunks.device)
        counted = torch.ones(chunks.shape[:2], device=chunks.device) if loss_mask is None else loss_mask.float()
        counted = counted[:, 1:]
        attended = None if attention_mask is None else attention_mask[:, :-1]
        hidden = self.hidden_states(chunks[:, :-1], attended, noise=noise)
        loss = hidden.new_zeros(())
        if teacher_samples is None or teacher_samples.weight < 1:
            loss = self.head.loss(hidden, chunks[:, 1:], mask=counted, noise=noise, vocabulary=vocabulary)
        if teacher_samples is not None:
            distilled = self.distillation_loss(hidden, teacher_samples, counted, noise, vocabulary)
            loss = torch.lerp(loss, distilled, teacher_samples.weight)
        if num_chunks is not None:
            loss = loss * counted.sum() / num_chunks
        return {"loss": loss}

    def distillation_loss(
        self,
        hidden: Tensor,
        teacher: TeacherSamples,
        mask: Tensor,
        noise: RowNoise,
        vocabulary: VocabularySubset | None = None,
    ) -> Tensor:
        """The head's loss for a teacher's samples, a mean over the positions that have some.

        A row counts by its share of those positions, so that the parts of a batch add up like those of the other loss.
        """
        here, counted = slice(None, None, teacher.stride), mask[:, :: teacher.stride]
        loss = self.head.samples_loss(
            hidden[:, here], teacher.samples, mask=counted, noise=noise, vocabulary=vocabulary
        )
        loss = loss * counted.sum() / mask.sum().clamp(min=1) * (mask.shape[1] / counted.shape[1])
        return torch.where(teacher.finite, loss, torch.nan)

    def config_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return self.config.to_dict()

    def fsdp_units(self) -> list[tuple[nn.Module, bool]]:
        """Modules that FSDP shards as groups of their own, and whether to reshard them after their forward pass."""
        layers = [(layer, True) for layer in self.backbone.layers]
        # The head stays gathered, since the backward pass begins with it; so does the embedding, the largest group.
        return [(self.chunk_embedding, False), *layers, (self.head, False)]

    def fsdp_replicated(self) -> list[nn.Module]:
        """Modules that every process keeps whole."""
        return [self.autoencoder]

    def compile_units(self) -> list[nn.Module]:
        """Modules that `train.compile` compiles, each by itself."""
        return [*self.backbone.layers, *self.head.compile_units()]

    def quantizable(self) -> list[nn.Module]:
        """Modules whose linear layers may be quantized."""
        return [self.backbone, self.chunk_embedding, *self.head.quantizable()]
