"""What is written in a model's config.json."""

import difflib
from typing import Any, Literal

from transformers import AutoConfig, PretrainedConfig

from calm.errors import ConfigError

HEAD_NAMES = ("energy", "flow", "diffusion")
INPUT_NAMES = ("discrete", "continuous", "both")


class ChunkAutoencoderConfig(PretrainedConfig):
    model_type = "calm-autoencoder"

    def __init__(
        self,
        vocab_size: int = 128_257,
        chunk_size: int = 4,  # K
        latent_size: int = 128,  # Z
        hidden_size: int = 512,
        intermediate_size: int = 1280,
        num_encoder_layers: int = 2,  # half before the squeeze, half after
        num_decoder_layers: int = 2,
        variational: bool = True,
        kl_weight: float = 1e-3,
        kl_floor: float = 0.5,
        token_dropout: float = 0.15,
        latent_dropout: float = 0.15,
        mask_token_id: int = 0,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        **kwargs,
    ):
        for name, value in (
            ("num_encoder_layers", num_encoder_layers),
            ("num_decoder_layers", num_decoder_layers),
        ):
            if value < 0 or value % 2:
                raise ValueError(f"{name} must be even, half on each side of the squeeze or expansion, not {value}")
        self.vocab_size = vocab_size
        self.chunk_size = chunk_size
        self.latent_size = latent_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_encoder_layers = num_encoder_layers
        self.num_decoder_layers = num_decoder_layers
        self.variational = variational
        self.kl_weight = kl_weight
        self.kl_floor = kl_floor
        self.token_dropout = token_dropout
        self.latent_dropout = latent_dropout
        self.mask_token_id = mask_token_id
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        super().__init__(**kwargs)


class CalmConfig(PretrainedConfig):
    """A backbone of any kind, the autoencoder inside, and the head's fields; those of other heads are ignored."""

    model_type = "calm"
    sub_configs = {"backbone_config": AutoConfig, "autoencoder_config": ChunkAutoencoderConfig}  # noqa: RUF012  # pyright: ignore

    def __init__(
        self,
        backbone_config: PretrainedConfig | dict[str, Any] | None = None,
        autoencoder_config: ChunkAutoencoderConfig | dict[str, Any] | None = None,
        model_input: Literal["discrete", "continuous", "both"] = "discrete",
        head: Literal["energy", "flow", "diffusion"] = "energy",
        num_head_layers: int | None = None,  # by default a quarter of the backbone's
        num_model_samples: int = 8,  # N
        num_target_samples: int | None = None,  # M of the energy head; None: closed form
        alpha: float = 1.0,  # exponent of the energy score
        noise_size: int = 64,  # of the energy head
        sampler: Literal["euler", "midpoint"] = "midpoint",  # of the flow head
        num_sampling_steps: int | None = None,  # of the flow and the diffusion head; by default 10 and 100
        **kwargs,
    ):
        _check_name("head", head, HEAD_NAMES)
        _check_name("model_input", model_input, INPUT_NAMES)
        if isinstance(autoencoder_config, dict):
            autoencoder_config = ChunkAutoencoderConfig(**autoencoder_config)
        self.autoencoder_config = autoencoder_config or ChunkAutoencoderConfig()
        if not isinstance(backbone_config, PretrainedConfig):
            backbone_config = _backbone_config(backbone_config or {}, self.autoencoder_config.vocab_size)
        self.backbone_config = backbone_config
        self.model_input = model_input
        self.head = head
        self.num_head_layers = num_head_layers or max(1, backbone_config.num_hidden_layers // 4)
        self.num_model_samples = num_model_samples
        self.num_target_samples = num_target_samples
        self.alpha = alpha
        self.noise_size = noise_size
        self.sampler = sampler
        self.num_sampling_steps = num_sampling_steps or (100 if head == "diffusion" else 10)
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    def get_text_config(self, *args, **kwargs):
        """Caches and attention ask for the part that attends."""
        return self.backbone_config

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


def _backbone_config(fields: dict[str, Any], vocab_size: int) -> PretrainedConfig:
    """A backbone by its `model_type` (Llama by default) and fields."""
    fields = {"model_type": "llama", "vocab_size": vocab_size, **fields}
    kind = fields.pop("model_type")
    try:
        return AutoConfig.for_model(kind, **fields)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"backbone {kind!r}: {str(error).splitlines()[0]}") from error


def _check_name(field: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{field} must be one of {', '.join(known)}, not {name!r}{hint}")


AutoConfig.register(ChunkAutoencoderConfig.model_type, ChunkAutoencoderConfig)
AutoConfig.register(CalmConfig.model_type, CalmConfig)
