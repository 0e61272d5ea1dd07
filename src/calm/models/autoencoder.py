"""The autoencoder of §2: K tokens ↔ one vector, without context.

    encode   K embeddings → layers on each → flatten, squeeze → layers → Posterior(mean, log_std) of Z dimensions
    decode   latent → layers → expand to K states → layers on each → logits over the tied embedding

Robustness (§2.2), each a field: the variational posterior, the KL's weight and floor, token and latent dropout.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from calm.models.configuration import ChunkAutoencoderConfig
from calm.models.layer import Layer
from calm.models.posterior import Posterior, drop, floored_kl
from calm.noise import RowNoise
from calm.scores.vocabulary import most_probable_words, nearest_words, vocabulary_cross_entropy


@dataclass
class AutoencoderOutput(ModelOutput):
    loss: Tensor | None = None  # reconstruction + kl_weight · KL
    reconstruction: Tensor | None = None  # nats a chunk
    kl: Tensor | None = None  # nats a chunk, floored


def count_chunks(input_ids: Tensor, attention_mask: Tensor | None, chunk_size: int) -> Tensor:
    """1 for each chunk that holds a real token, else 0: (B, L)."""
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return real.unflatten(1, (-1, chunk_size)).any(-1).float()


def _layers(config: ChunkAutoencoderConfig, count: int) -> nn.Sequential:
    return nn.Sequential(
        *(Layer(config.hidden_size, config.intermediate_size, config.rms_norm_eps) for _ in range(count))
    )


class Encoder(nn.Module):
    def __init__(self, config: ChunkAutoencoderConfig):
        super().__init__()
        size, half = config.hidden_size, config.num_encoder_layers // 2
        self.token_layers = _layers(config, half)
        self.squeeze = nn.Linear(config.chunk_size * size, size)
        self.chunk_layers = _layers(config, half)
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.posterior = nn.Linear(size, config.latent_size * (2 if config.variational else 1))
        self.variational = config.variational

    def forward(self, embeddings: Tensor) -> Posterior:
        states = self.token_layers(embeddings)  # (..., K, d)
        states = self.chunk_layers(self.squeeze(states.flatten(-2)))  # (..., d)
        output = self.posterior(self.norm(states))  # (..., 2Z)
        if not self.variational:
            return Posterior(output, torch.full_like(output, -torch.inf))
        return Posterior(*output.chunk(2, dim=-1))


class Decoder(nn.Module):
    def __init__(self, config: ChunkAutoencoderConfig):
        super().__init__()
        size, half = config.hidden_size, config.num_decoder_layers // 2
        self.latent = nn.Linear(config.latent_size, size)
        self.chunk_layers = _layers(config, half)
        self.expand = nn.Linear(size, config.chunk_size * size)
        self.token_layers = _layers(config, half)
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.chunk_size = config.chunk_size

    def forward(self, latents: Tensor) -> Tensor:
        return self.token_states(self.chunk_states(latents), 0, self.chunk_size)

    def chunk_states(self, latents: Tensor) -> Tensor:
        """What all tokens of a chunk are made from: (..., Z) → (..., d)."""
        return self.chunk_layers(self.latent(latents))

    def token_states(self, chunk_states: Tensor, first: int, last: int) -> Tensor:
        """The states of some tokens of each chunk, from `first` to before `last`: (..., d) → (..., last - first, d)."""
        size = chunk_states.shape[-1]
        rows = slice(first * size, last * size)
        states = F.linear(chunk_states, self.expand.weight[rows], self.expand.bias[rows])
        return self.norm(self.token_layers(states.unflatten(-1, (last - first, size))))


class ChunkAutoencoder(PreTrainedModel):
    config_class = ChunkAutoencoderConfig
    config: ChunkAutoencoderConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True  # it has none
    entered_by = ("encode", "decode", "tokens", "reconstruct")  # methods that need whole parameters under FSDP

    def __init__(self, config: ChunkAutoencoderConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)  # the decoder's output matrix, too
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)

    def encode(self, chunks: Tensor) -> Posterior:
        """(..., K) ids → Posterior of (..., Z)."""
        return self.encoder(self.embedding(chunks))

    def decode(self, latents: Tensor) -> Tensor:
        """(..., Z) → logits (..., K, V)."""
        return self.decoder(latents) @ self.embedding.weight.T

    def tokens(self, latents: Tensor, search: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The most probable chunk of each latent: (..., Z) → (..., K) ids; `search` finds words of states (n, d)."""
        states = self.decoder(latents)  # (..., K, d)
        flat = states.flatten(0, -2)
        found = search(flat) if search is not None else most_probable_words(flat, self.embedding.weight)
        return found.view(states.shape[:-1])

    def reconstruct(self, latents: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that latents stand for, and the nats that the true ones cost: (..., K) and (..., K)."""
        states = self.decoder(latents)
        ids, losses = nearest_words(states.flatten(0, -2), self.embedding.weight, chunks.flatten())
        return ids.view_as(chunks), losses.view_as(chunks)

    def sharded_parts(self) -> list[nn.Module]:
        """Groups of their own under FSDP; the embedding, used at both ends, stays with the root."""
        return [self.encoder, self.decoder]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        noise: RowNoise | None = None,
        candidates: Tensor | None = None,
        num_chunks: float | None = None,
    ) -> AutoencoderOutput:
        """The loss of §2 on rows of whole chunks (B, T). Chunks without a real token do not count.

        `candidates` limits the softmax to some words (see scores.vocabulary). The mean is over `num_chunks`, by
        default those of this batch; a batch that is computed in parts gives the number of all its chunks.
        In eval mode nothing is dropped.
        """
        config = self.config
        noise = noise or RowNoise.fresh(len(input_ids), input_ids.device)
        chunks = input_ids.unflatten(1, (-1, config.chunk_size))  # (B, L, K)
        length = chunks.shape[1]
        counted = count_chunks(input_ids, attention_mask, config.chunk_size)  # (B, L)

        shown = chunks
        if self.training and config.token_dropout:
            dropped = noise.uniform(length, config.chunk_size) < config.token_dropout
            shown = chunks.masked_fill(dropped, config.mask_token_id)
        posterior = self.encode(shown)
        latents = posterior.mean
        if config.variational:
            latents = posterior.sample(noise.normal(length, config.latent_size, dtype=latents.dtype))
        if self.training and config.latent_dropout:
            latents = drop(latents, noise.uniform(length, config.latent_size), config.latent_dropout)

        states = self.decoder(latents).flatten(0, 2)  # (B·L·K, d)
        counted = counted / (num_chunks or counted.sum().clamp(min=1))
        weights = counted.flatten().repeat_interleave(config.chunk_size)
        reconstruction = vocabulary_cross_entropy(states, self.embedding.weight, chunks.flatten(), weights, candidates)
        kl = reconstruction.new_zeros(())
        if config.variational:
            kl = (floored_kl(posterior.float(), config.kl_floor) * counted).sum()
        return AutoencoderOutput(reconstruction + config.kl_weight * kl, reconstruction, kl)


# Last: with the Auto classes our other models are imported, too (see calm/_auto.py), and they need this one.
from transformers import AutoModel  # noqa: E402

AutoModel.register(ChunkAutoencoderConfig, ChunkAutoencoder)
