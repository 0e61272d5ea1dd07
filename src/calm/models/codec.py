"""The autoencoder of §2: K tokens ↔ one vector, without context.

    encode   K embeddings → layers on each → flatten, squeeze → layers → Posterior(mean, log_std) of Z dimensions
    decode   latent → layers → expand to K states → layers on each → logits over the tied embedding

Trained as a `ChunkAutoencoder` (autoencoder.py), which adds the loss and what transformers wants of a model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from calm.models.fields import AutoencoderFields
from calm.models.layer import Layer
from calm.models.posterior import Posterior
from calm.products import linear
from calm.scores.vocabulary import most_probable_words, nearest_words


def _layers(config: AutoencoderFields, count: int) -> nn.Sequential:
    return nn.Sequential(
        *(Layer(config.hidden_size, config.intermediate_size, config.rms_norm_eps) for _ in range(count))
    )


class Encoder(nn.Module):
    def __init__(self, config: AutoencoderFields):
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
    def __init__(self, config: AutoencoderFields):
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
        if last - first == self.chunk_size:
            states = self.expand(chunk_states)  # which may be a faster layer
        else:
            rows = slice(first * size, last * size)
            states = linear(chunk_states, self.expand.weight[rows], self.expand.bias[rows])
        return self.norm(self.token_layers(states.unflatten(-1, (last - first, size))))


class Codec(nn.Module):
    config: Any  # AutoencoderFields

    def add_parts(self) -> None:
        config = self.config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)  # the decoder's output matrix, too
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def encode(self, chunks: Tensor) -> Posterior:
        """(..., K) ids → Posterior of (..., Z)."""
        return self.encoder(self.embedding(chunks))

    def decode(self, latents: Tensor) -> Tensor:
        """(..., Z) → logits (..., K, V)."""
        return linear(self.decoder(latents), self.embedding.weight)

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
