"""What a batch of growing texts asks of a model: read chunks, choose the next ones.

A softmax model has chunks of one token, so that it can be asked beside ours.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from calm.errors import ConfigError
from calm.linear import prepare_for_writing
from calm.models.fields import check_positions
from calm.models.network import CalmNetwork
from calm.noise import RowNoise, draw_uniform
from calm.sampling.cache import Cache, RoomyCache, transformers_cache
from calm.sampling.llama_step import LlamaStep, takes_steps
from calm.sampling.mixture import sample_mixture
from calm.sampling.native_layers import take_native_layers
from calm.sampling.next_chunk import Chosen, Sampling, next_chunks, sure
from calm.sampling.vocabulary import search_of


class Predictor(Protocol):
    model: Any
    chunk_size: int
    knows_fill: bool  # whether fill ids may stand before a text
    unit: str  # what positions count
    last_states: "LastStates"

    def resolve(self, sampling: Sampling) -> Sampling:
        """With the method that suits the model, where none was named; what it cannot do is refused."""
        ...

    def read(self, chunks: Tensor, there: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """States behind the last of some chunks (B, L, K): (B, H).

        `there` (B, all) says what can be attended to: from some place on, where a text begins, everything.
        """
        ...

    def choose(self, hidden: Tensor, sampling: Sampling, noise: RowNoise) -> Chosen:
        """A chunk behind each state (B, H)."""
        ...


class CalmPredictor:
    unit = "chunks"

    def __init__(self, model: CalmNetwork):
        self.model = model
        self.last_states = LastStates(model.backbone)  # first: matrices that it joins are not moved twice
        prepare_for_writing(model)
        take_native_layers(model)
        self.chunk_size, self.knows_fill = model.config.chunk_size, model.config.knows_fill

    def resolve(self, sampling: Sampling) -> Sampling:
        return sampling.of(self.model.config)

    def read(self, chunks: Tensor, there: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        return self.last_states(self.model.embed(chunks), there, positions, cache)

    def choose(self, hidden: Tensor, sampling: Sampling, noise: RowNoise) -> Chosen:
        return next_chunks(self.model, search_of(self.model.autoencoder), hidden, sampling, noise)


class SoftmaxPredictor:
    unit = "tokens"
    chunk_size = 1
    knows_fill = True

    def __init__(self, model: Any):  # one of transformers
        self.model = model
        self.last_states = LastStates(model.base_model)
        prepare_for_writing(model)
        self.embed = model.get_input_embeddings()
        self.project = model.get_output_embeddings()

    def resolve(self, sampling: Sampling) -> Sampling:
        if sampling.method is not None or sampling.num_candidates is not None:
            raise ConfigError("a Transformer has probabilities: it takes a temperature, no method and no candidates")
        return sampling

    def read(self, chunks: Tensor, there: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        return self.last_states(self.embed(chunks[..., 0]), there, positions, cache)

    def choose(self, hidden: Tensor, sampling: Sampling, noise: RowNoise) -> Chosen:
        logs = self.project(hidden).float().log_softmax(-1)[:, None]  # (B, 1, V)
        tokens, found = sample_mixture(lambda _: logs, 1, sampling.cut, draw_uniform(noise, hidden, 1, 1)[0])
        return Chosen(tokens, sure(torch.ones_like(tokens[:, 0])), found[:, 0].exp(), found)


class LastStates:
    """States behind the last of some embedded positions (B, L, H): (B, H)."""

    def __init__(self, backbone: Any):
        self.backbone = backbone
        self.step = LlamaStep(backbone) if takes_steps(backbone) else None

    def cache(self) -> Cache:
        """An empty one."""
        return transformers_cache() if self.step is None else RoomyCache(len(self.step.layers))

    def __call__(self, embedded: Tensor, there: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        if self.step is not None:
            return self.step(embedded, there, positions, cache)
        return self.backbone(
            inputs_embeds=embedded,
            attention_mask=there.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]


def readable(predictor: Predictor, prompt: list[int]) -> list[int]:
    """For a model that never saw fill, up to K-1 leading tokens are left out, unless that is all there is."""
    size = predictor.chunk_size
    return prompt if predictor.knows_fill or len(prompt) < size else prompt[len(prompt) % size :]


def check_room(predictor: Predictor, prompt: list[int], max_new_tokens: int) -> None:
    """Refuse a text that a model has no words or no positions for."""
    config, size = predictor.model.config, predictor.chunk_size
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be a whole number, at least 1, not {max_new_tokens}")
    for token in set(prompt):
        if not 0 <= token < config.vocab_size:
            raise ConfigError(f"a prompt has token {token}, and the model has {config.vocab_size} words")
    length = max(1, -(-len(readable(predictor, prompt)) // size)) + -(-max_new_tokens // size) - 1
    check_positions(getattr(config, "backbone_config", config), length, predictor.unit)
