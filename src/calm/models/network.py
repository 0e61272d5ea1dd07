"""The network of §3: read chunks of K tokens, draw the next one.

    chunk (K) ─► chunk embedding ─► backbone ─► hidden state (H) ─► head ─► latent of the next chunk ─► tokens

What the backbone makes of embedded chunks is asked for elsewhere: in training of transformers (calm.py), in writing by
sampling/llama_step.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from calm.errors import UserError
from calm.heads import LATENT_HEADS, ChainHead, LatentHead
from calm.models.chunk_embedding import ChunkEmbedding
from calm.models.fields import CalmFields
from calm.models.posterior import Posterior
from calm.noise import Source, draw_normal, draw_uniform
from calm.scores.vocabulary import drawn_words

Search = Callable[[Tensor], Tensor]  # the most probable words of states (n, d)
HEAD_FIELDS = {
    "energy": ("num_model_samples", "num_target_samples", "alpha", "noise_size"),
    "mean-flow": ("num_model_samples",),
    "flow": ("num_model_samples", "sampler", "num_sampling_steps"),
    "diffusion": ("num_model_samples", "num_sampling_steps", "largest_latent"),
}


def build_head(config: CalmFields) -> LatentHead | ChainHead:
    if config.is_chain:
        word_size = config.autoencoder_config.hidden_size
        own_words = config.vocab_size if config.own_words else None
        return ChainHead(config.hidden_size, word_size, config.chunk_size, config.num_head_layers, own_words)
    fields = {name: getattr(config, name) for name in HEAD_FIELDS[config.head]}
    return LATENT_HEADS[config.head](config.hidden_size, config.latent_size, config.num_head_layers, **fields)


def _finite(numbers: Tensor) -> Tensor:
    if not bool(numbers.isfinite().all()):
        raise UserError("the model's numbers are not finite: its weights are damaged")
    return numbers


class CalmNetwork(nn.Module):
    config: Any  # CalmFields
    autoencoder: Any  # a Codec, frozen

    def add_parts(self, backbone: nn.Module, tokens: nn.Embedding) -> None:
        """All but the autoencoder; `tokens` is the backbone's own embedding."""
        self.backbone = backbone
        self.chunk_embedding = ChunkEmbedding(self.config, tokens)
        self.head = build_head(self.config)

    def embed(self, chunks: Tensor, latents: Tensor | None = None, generator: Source = None) -> Tensor:
        """What the backbone reads for chunks (..., K): (..., H).

        A model that reads latents takes those given (..., Z), or the posteriors' means, in training samples of them.
        """
        if self.chunk_embedding.reads_latents and latents is None:
            posterior = self.posterior(chunks)
            latents = posterior.mean
            if self.training:
                latents = posterior.sample(draw_normal(generator, latents, 1, self.config.latent_size)[0])
        return self.chunk_embedding(chunks, latents)

    @torch.no_grad()
    def posterior(self, chunks: Tensor) -> Posterior:
        """What the frozen autoencoder makes of chunks (..., K)."""
        return self.autoencoder.encode(chunks)

    def draw(
        self, hidden: Tensor, num_samples: int = 1, generator: Source = None, search: Search | None = None
    ) -> Tensor:
        """Chunks that may follow hidden states: (..., H) → (N, ..., K); `search` finds the words of a latent."""
        if not self.config.is_chain:
            return self.autoencoder.tokens(self.draw_latents(hidden, num_samples, generator), search)
        words, size = self.words, self.config.chunk_size
        uniform = draw_uniform(generator, hidden, num_samples, size)  # (N, ..., K)
        state = self.next_state(_finite(hidden), words.new_empty(*hidden.shape[:-1], 0, dtype=torch.long))
        for_all = uniform[..., 0].flatten(1).T.contiguous()  # one state for N samples
        first = drawn_words(state.flatten(0, -2), words, for_all)
        chunks = first.T.reshape(uniform.shape[:-1])[..., None]  # (N, ..., 1)
        for k in range(1, size):
            states = self.next_state(hidden, chunks)
            drawn = drawn_words(states.flatten(0, -2), words, uniform[..., k].reshape(-1, 1))
            chunks = torch.cat([chunks, drawn.view(*chunks.shape[:-1], 1)], dim=-1)
        return chunks

    def draw_latents(self, hidden: Tensor, num_samples: int = 1, generator: Source = None) -> Tensor:
        """Samples of the next latent, checked: (..., H) → (N, ..., Z). Not of a chain, which draws tokens."""
        assert not isinstance(self.head, ChainHead)
        return _finite(self.head.sample(hidden, num_samples, generator))

    def chain_states(self, hidden: Tensor, chunks: Tensor) -> Tensor:
        """Of a chain: the states of all tokens of chunks (..., K), each behind the true ones before it: (..., K, d)."""
        assert isinstance(self.head, ChainHead)
        return self.head(hidden, self.words[chunks[..., :-1]])

    def next_state(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Of a chain: the state of the token behind the first ones of a chunk (..., k): (..., d)."""
        assert isinstance(self.head, ChainHead)
        return self.head(hidden, self.words[before], before.shape[-1])[..., 0, :]

    @property
    def words(self) -> Tensor:
        """The vectors of the vocabulary: (V, d)."""
        own = self.head.own_words if isinstance(self.head, ChainHead) else None
        return (own or self.autoencoder.embedding).weight
