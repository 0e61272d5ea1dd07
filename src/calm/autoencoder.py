"""The autoencoder of §2: K tokens ↔ one continuous vector, without context.

    encode   K embeddings → layers on each → flatten, squeeze → layers → posterior N(mean, std²) of Z dimensions
    decode   latent → layers → expand to K states → layers on each → logits over the tied embedding

Robustness (§2.2), each a field of the config: variational posterior, KL weight and floor, token and latent dropout.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from calm.noise import RowNoise
from calm.scores.vocabulary import VocabularySubset, most_probable_tokens, token_losses, vocabulary_cross_entropy


class AutoencoderSettings(BaseModel):
    """What a recipe says about an autoencoder; the defaults are the paper's for K = 4."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    latent_size: int = Field(128, ge=1, description="Z, dimensions of the latent vector; the paper uses 32·K")
    hidden_size: int = Field(512, ge=1)
    intermediate_size: int = Field(1280, ge=1)
    num_encoder_layers: int = Field(2, ge=0, multiple_of=2, description="half before the squeeze, half after it")
    num_decoder_layers: int = Field(2, ge=0, multiple_of=2, description="half before the expansion, half after it")
    variational: bool = Field(True, description="false: reconstruction only, without noise and KL")
    kl_weight: float = Field(1e-3, ge=0, description="β, weight of the KL divergence")
    kl_floor: float = Field(0.5, ge=0, description="λ_KL, lower bound of a dimension's KL in nats; 0: no bound")
    token_dropout: float = Field(0.15, ge=0, lt=1, description="share of input tokens replaced by the mask token")
    latent_dropout: float = Field(0.15, ge=0, lt=1, description="share of latent dimensions set to 0")


class AutoencoderConfig(AutoencoderSettings):
    """All that defines an autoencoder: the fields of its config.json."""

    vocab_size: int = Field(128_257, ge=1)
    chunk_size: int = Field(4, ge=1, description="K, tokens per chunk")
    mask_token_id: int = 0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    model_type: ClassVar[str] = "calm-autoencoder"

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": self.model_type, **self.model_dump()}


class Posterior(NamedTuple):
    """q(z|x): a diagonal Gaussian over the latent vector of a chunk."""

    mean: Tensor  # (..., Z)
    log_std: Tensor  # (..., Z); minus infinity if the autoencoder is not variational

    @property
    def std(self) -> Tensor:
        return self.log_std.exp()

    def sample(self, noise: Tensor) -> Tensor:
        """mean + std·noise, for standard normal noise of any shape that broadcasts."""
        return self.mean + self.std * noise

    def kl(self) -> Tensor:
        """KL divergence from the standard normal prior, per dimension: (..., Z)."""
        return 0.5 * (self.mean**2 + (2 * self.log_std).exp() - 1) - self.log_std

    def float(self) -> "Posterior":
        return Posterior(self.mean.float(), self.log_std.float())


def floored_kl(posterior: Posterior, floor: float) -> Tensor:
    """KL of a chunk with each dimension's share clipped from below, so that no dimension gains by collapsing: (...)."""
    return posterior.kl().clamp(min=floor).sum(-1) if floor else posterior.kl().sum(-1)


def latent_dropout(latents: Tensor, uniform: Tensor, rate: float) -> Tensor:
    """Dropout of latent dimensions, given uniform noise; the remaining ones are scaled up."""
    return torch.where(uniform < rate, 0, latents / (1 - rate))


class SwiGLULayer(nn.Module):
    """x + SwiGLU(RMSNorm(x)), on each vector by itself."""

    def __init__(self, size: int, intermediate_size: int, eps: float):
        super().__init__()
        self.norm = nn.RMSNorm(size, eps=eps)
        self.gate = nn.Linear(size, intermediate_size, bias=False)
        self.up = nn.Linear(size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class SplitLinear(nn.Linear):
    """A linear layer to K vectors of `size`, of which a caller may ask for a range only: (..., d) → (..., n, size)."""

    def __init__(self, in_features: int, count: int, size: int):
        super().__init__(in_features, count * size)
        self.count, self.size = count, size

    def forward(self, input: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        last = self.count if last is None else last
        rows = slice(first * self.size, last * self.size)
        return self.project(input, self.weight[rows], self.bias[rows]).unflatten(-1, (last - first, self.size))

    def project(self, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(input, weight, bias)


class VocabularyProjection(nn.Module):
    """Logits over the vocabulary; a module of its own so that a backend can replace it."""

    def forward(self, states: Tensor, vocabulary: Tensor) -> Tensor:
        """(..., d), (V, d) → (..., V)"""
        return F.linear(states, vocabulary)


class NearestTokens(nn.Module):
    """Argmax over the vocabulary; a module of its own so that a backend can replace it."""

    def forward(self, states: Tensor, vocabulary: Tensor) -> Tensor:
        """(n, d), (V, d) → (n,)"""
        return most_probable_tokens(states, vocabulary)

    def streamed(self, vocabulary: Tensor) -> Tensor:
        """As much memory as one search reads."""
        return vocabulary


def matmul_flops(*modules: nn.Module) -> float:
    """FLOPs of one vector through the linear layers of some modules: two per weight."""
    linears = [part for module in modules for part in module.modules() if isinstance(part, nn.Linear)]
    return 2.0 * sum(linear.weight.numel() for linear in linears)


def _layers(config: Any, count: int) -> nn.Sequential:
    return nn.Sequential(
        *(SwiGLULayer(config.hidden_size, config.intermediate_size, config.rms_norm_eps) for _ in range(count))
    )


class Encoder(nn.Module):
    """Token embeddings of a chunk (..., K, d) → posterior of its latent (..., Z)."""

    def __init__(self, config: Any):
        super().__init__()
        size, half = config.hidden_size, config.num_encoder_layers // 2
        self.token_layers = _layers(config, half)
        self.squeeze = nn.Linear(config.chunk_size * size, size)
        self.chunk_layers = _layers(config, half)
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.posterior = nn.Linear(size, (2 if config.variational else 1) * config.latent_size)
        self.variational = config.variational

    def forward(self, embeddings: Tensor) -> Posterior:
        if torch.is_autocast_enabled(embeddings.device.type):
            embeddings = embeddings.float()  # the residual stream; FSDP may have gathered the embedding in bf16
        states = self.token_layers(embeddings)  # (..., K, d)
        states = self.chunk_layers(self.squeeze(states.flatten(-2)))  # (..., d)
        output = self.posterior(self.norm(states))  # (..., 2Z)
        if not self.variational:
            return Posterior(output, torch.full_like(output, -torch.inf))
        return Posterior(*output.chunk(2, dim=-1))


class Decoder(nn.Module):
    """Latents (..., Z) → states of the K tokens (..., K, d), which decode to the nearest token embeddings."""

    def __init__(self, config: Any):
        super().__init__()
        size, half = config.hidden_size, config.num_decoder_layers // 2
        self.latent = nn.Linear(config.latent_size, size)
        self.chunk_layers = _layers(config, half)
        self.expand = SplitLinear(size, config.chunk_size, size)
        self.token_layers = _layers(config, half)
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)

    def forward(self, latents: Tensor) -> Tensor:
        """(..., Z) → states of all tokens (..., K, d)."""
        return self.token_states(self.chunk_states(latents))

    def chunk_states(self, latents: Tensor) -> Tensor:
        """The part that all tokens of a chunk share: (..., Z) → (..., d)."""
        return self.chunk_layers(self.latent(latents.to(self.latent.weight.dtype)))  # noise is drawn in fp32

    def token_states(self, chunk_states: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """States of the tokens from `first` to before `last` of each chunk: (..., d) → (..., last - first, d)."""
        return self.norm(self.token_layers(self.expand(chunk_states, first, last)))


def chunk_mask(token_mask: Tensor, chunk_size: int) -> Tensor:
    """1 for each chunk with at least one valid token, else 0: (B, T) → (B, L), in fp32."""
    return token_mask.unflatten(1, (-1, chunk_size)).any(-1).float()


class Autoencoder(nn.Module):
    """Maps chunks of K tokens to latent vectors and back.

    Args:
        config: an `AutoencoderConfig`, or transformers' `ChunkAutoencoderConfig`.

    Example:
        >>> autoencoder = Autoencoder(AutoencoderConfig(vocab_size=256, chunk_size=4))
        >>> autoencoder.tokens(autoencoder.encode(torch.randint(256, (10, 4))).mean).shape
        torch.Size([10, 4])
    """

    config: Any
    fsdp_methods = ("encode", "decode", "tokens", "reconstruct")  # called from outside of `forward`

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.build(config)
        self.reset_parameters()

    def build(self, config: Any) -> None:
        """Add the submodules. Separate from `__init__` for the classes of transformers in `hf.py`, which call it."""
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)  # also the decoder's output matrix
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.project = VocabularyProjection()
        self.nearest = NearestTokens()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def encode(self, chunks: Tensor) -> Posterior:
        """Posterior of the latents of chunks: ids (..., K) → mean and log_std (..., Z)."""
        return self.encoder(self.embedding(chunks))

    def decode(self, latents: Tensor) -> Tensor:
        """Logits: (..., Z) → (..., K, V)."""
        return self.logits(self.decoder(latents))

    def logits(self, states: Tensor) -> Tensor:
        """Logits of decoded states: (..., d) → (..., V)."""
        return self.project(states, self.embedding.weight)

    def tokens(self, latents: Tensor) -> Tensor:
        """The most probable chunk of each latent: (..., Z) → ids (..., K)."""
        return self.tokens_of(self.decoder(latents))

    def tokens_of(self, states: Tensor) -> Tensor:
        """The most probable token of each decoded state: (..., d) → ids (...)."""
        return self.nearest(states.flatten(0, -2), self.embedding.weight).view(states.shape[:-1])

    def reconstruct(self, latents: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Most probable tokens of latents (..., Z), and the cross-entropy of the true ones: (..., K) and (..., K)."""
        states = self.decoder(latents)
        ids, losses = token_losses(states.flatten(0, -2), self.embedding.weight, chunks.flatten())
        return ids.view_as(chunks), losses.view_as(chunks)

    def config_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return {"architectures": ["ChunkAutoencoder"], **self.config.to_dict()}

    def flops(self) -> tuple[float, float, float]:
        """FLOPs per chunk of the encoder, of the decoder, and of its projection onto the vocabulary."""
        K, encoder, decoder = self.config.chunk_size, self.encoder, self.decoder
        encoding = K * matmul_flops(encoder.token_layers)
        encoding += matmul_flops(encoder.squeeze, encoder.chunk_layers, encoder.posterior)
        decoding = K * matmul_flops(decoder.token_layers)
        decoding += matmul_flops(decoder.latent, decoder.chunk_layers, decoder.expand)
        return encoding, decoding, 2.0 * K * self.embedding.weight.numel()

    def fsdp_units(self) -> list[tuple[nn.Module, bool]]:
        """See `Calm.fsdp_units`; the embedding, used at both ends, stays with the root."""
        return [(self.encoder, True), (self.decoder, False)]

    def fsdp_replicated(self) -> list[nn.Module]:
        return []

    def compile_units(self) -> list[nn.Module]:
        return [layer for layer in self.modules() if isinstance(layer, SwiGLULayer)]

    def forward(
        self,
        chunks: Tensor,
        loss_mask: Tensor | None = None,
        noise: RowNoise | None = None,
        vocabulary: VocabularySubset | None = None,
        num_chunks: float | Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Training loss of §2. In eval mode there is no dropout; latents are sampled all the same.

        Args:
            chunks: ids (B, L, K).
            loss_mask: 1 for the chunks that count (B, L); all by default.
            noise: one generator per row.
            vocabulary: estimate the softmax from some tokens.
            num_chunks: number of chunks to average over, if the batch is computed in parts.

        Returns:
            `loss` = `reconstruction` + kl_weight · `kl`, in nats per chunk.
        """
        config, length = self.config, chunks.shape[1]
        noise = noise or RowNoise.fresh(len(chunks), chunks.device)
        counted = torch.ones(chunks.shape[:2], device=chunks.device) if loss_mask is None else loss_mask.float()

        visible = chunks
        if self.training and config.token_dropout:
            dropped = noise.uniform(length, config.chunk_size) < config.token_dropout
            visible = chunks.masked_fill(dropped, config.mask_token_id)
        posterior = self.encoder(self.embedding(visible))
        latents = posterior.mean
        if config.variational:
            latents = posterior.sample(noise.normal(length, config.latent_size, dtype=latents.dtype))
        if self.training and config.latent_dropout:
            latents = latent_dropout(latents, noise.uniform(length, config.latent_size), config.latent_dropout)

        states = self.decoder(latents).flatten(0, 2)  # (B·L·K, d)
        counted = counted / (counted.sum().clamp(min=1) if num_chunks is None else num_chunks)
        weights = counted.flatten().repeat_interleave(config.chunk_size)
        targets = chunks.flatten()
        reconstruction = vocabulary_cross_entropy(
            states, self.embedding.weight, targets, weights, vocabulary, self.project.forward
        )
        kl = reconstruction.new_zeros(())
        if config.variational:
            kl = (floored_kl(posterior.float(), config.kl_floor) * counted).sum()
        return {"loss": reconstruction + config.kl_weight * kl, "reconstruction": reconstruction, "kl": kl}
