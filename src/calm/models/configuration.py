"""What is written in a model's config.json."""

from transformers import AutoConfig, PretrainedConfig


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


AutoConfig.register(ChunkAutoencoderConfig.model_type, ChunkAutoencoderConfig)
