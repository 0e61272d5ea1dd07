"""The fields of a model's config.json, their defaults and checks, without transformers.

What the library's configs add is in configuration.py. A model that only writes does with a plain base (plain.py), since
importing transformers takes longer than reading a model and its first chunks.
"""

from typing import Any, Literal

from calm.errors import ConfigError, did_you_mean

HEADS = ("energy", "flow", "mean-flow", "diffusion", "chain")
INPUTS = ("discrete", "continuous", "both")
STEPS = {"euler": 20, "midpoint": 10}  # of the flow head's samplers, by default


class AutoencoderFields:
    """Of an autoencoder. What is not named here goes on to the next base class, as do `CalmFields`."""

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


class CalmFields:
    """A backbone of any kind, the autoencoder inside, and the head's fields; those of other heads are ignored."""

    model_type = "calm"

    def __init__(
        self,
        backbone_config: Any = None,
        autoencoder_config: Any = None,
        model_input: Literal["discrete", "continuous", "both"] = "discrete",
        head: Literal["energy", "flow", "mean-flow", "diffusion", "chain"] = "energy",
        num_head_layers: int | None = None,  # by default a quarter of the backbone's
        num_model_samples: int = 8,  # N
        num_target_samples: int | None = None,  # M of the energy head; None: closed form
        alpha: float = 1.0,  # exponent of the energy score
        noise_size: int = 64,  # of the energy head
        sampler: Literal["euler", "midpoint"] = "midpoint",  # of the flow head
        own_words: bool = False,  # of the chain head: words of its own, which learn, instead of the autoencoder's
        num_sampling_steps: int | None = None,  # of the flow head (10, or 20 Euler steps) and the diffusion head (100)
        largest_latent: float | None = 10.0,  # of the diffusion head: no number of a latent is larger; None: unknown
        knows_fill: bool = True,  # whether fill ids at the front of texts were seen in training
        **kwargs,
    ):
        for field, name, known in (
            ("head", head, HEADS),
            ("model_input", model_input, INPUTS),
            ("sampler", sampler, STEPS),
        ):
            if name not in known:
                raise ConfigError(f"{field} must be one of {', '.join(known)}, not {name!r}{did_you_mean(name, known)}")
        self.autoencoder_config = self.autoencoder_fields(autoencoder_config)
        self.backbone_config = self.backbone_fields(backbone_config)
        if num_head_layers is None:
            num_head_layers = max(1, self.backbone_config.num_hidden_layers // 4)
        if num_sampling_steps is None:
            num_sampling_steps = STEPS[sampler] if head == "flow" else 100
        counts = {"num_head_layers": num_head_layers, "num_model_samples": num_model_samples, "noise_size": noise_size}
        counts |= {
            "num_sampling_steps": num_sampling_steps,
            "num_target_samples": 1 if num_target_samples is None else num_target_samples,
        }
        for field, count in counts.items():
            if count < 1:
                raise ConfigError(f"{field} must be at least 1, not {count}")
        if largest_latent is not None and largest_latent <= 0:
            raise ConfigError(f"largest_latent must be above 0, or null, not {largest_latent}")
        self.model_input = model_input
        self.head = head
        self.num_head_layers = num_head_layers
        self.num_model_samples = num_model_samples
        self.num_target_samples = num_target_samples
        self.alpha = alpha
        self.noise_size = noise_size
        self.sampler = sampler
        self.num_sampling_steps = num_sampling_steps
        self.largest_latent = largest_latent
        self.own_words = own_words
        self.knows_fill = knows_fill
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    def autoencoder_fields(self, given: Any) -> Any:
        """Of a subclass: the autoencoder's config, of what was given: one, its fields, or nothing."""

    def backbone_fields(self, given: Any) -> Any:
        """Of a subclass: the same for the backbone, when the autoencoder's is known."""

    @property
    def is_chain(self) -> bool:
        """Whether a chunk is learnt and drawn token after token, instead of as a latent."""
        return self.head == "chain"

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


def check_positions(config: Any, length: int, unit: str) -> None:
    """Refuse a sequence that is longer than a backbone's positions."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ConfigError(
            f"{length} {unit} are more than the backbone's {longest} positions; read shorter sequences, or set the "
            "backbone's max_position_embeddings"
        )
