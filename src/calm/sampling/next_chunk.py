"""The next chunk of each text at a temperature: which method, on which candidates of a CALM model.

token     one token after the other, by its weight among the candidates that agree so far
batch     Algorithm 2: whole chunks, by how often they occur among the candidates
exact     Algorithm 1: rejection until the distribution is right, however long that takes
mixture   the decoder's softmaxes, averaged over candidates; also top-k, top-p and min-p
noise     a heuristic (§8): one draw whose noise is scaled by the temperature
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from calm.errors import ConfigError, did_you_mean
from calm.models.fields import CalmFields
from calm.models.network import CalmNetwork
from calm.noise import RowNoise, ScaledNoise, draw_uniform
from calm.products import linear
from calm.sampling.candidates import UNKNOWN, Candidates
from calm.sampling.mixture import Cut, Softmaxes, sample_mixture
from calm.sampling.rejection import MOST_DRAWS, sample_at_temperature
from calm.sampling.temperature import (
    Cost,
    grow_until_settled,
    inverse,
    sample_from_candidates,
    sample_token_by_token,
)
from calm.sampling.vocabulary import VocabularySearch
from calm.scores.vocabulary import word_products

Method = Literal["token", "batch", "exact", "mixture", "noise"]
MANY, FEW = 200, 64  # candidates: those that are counted, those whose softmaxes are averaged
NUMBERS: dict[Method | None, int] = {"mixture": FEW, "exact": MOST_DRAWS}  # of other methods MANY
ROOM = 2**26  # probabilities held at once
BLOCK = 25  # candidates that are drawn at once where a tolerance may spare the rest


@dataclass(frozen=True)
class Sampling:
    """How chunks are chosen."""

    temperature: float = 1.0
    # N; by default 200, and 64 for "mixture", of which a chain needs one; of "exact" the most draws
    num_candidates: int | None = None
    method: Method | None = None  # by default "token", and "mixture" for a chain
    tolerance: float = 0.0  # of "batch": the total variation at which no more candidates are drawn; 0 is all of them
    refill: bool = False  # of "token": draw anew where fewer than 1/T candidates agree with the tokens so far
    top_k: int | None = None  # these three of "mixture"
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        known = get_args(Method)
        if self.method is not None and self.method not in known:
            raise ConfigError(f"method must be one of {', '.join(known)}{did_you_mean(self.method, known)}")
        if self.num_candidates is not None and (not isinstance(self.num_candidates, int) or self.num_candidates < 1):
            raise ConfigError(f"num_candidates must be a whole number, at least 1, not {self.num_candidates}")
        if not 0 <= self.tolerance <= 1:
            raise ConfigError(f"tolerance is a total variation, from 0 to 1, not {self.tolerance}")
        for name, method in {"tolerance": "batch", "refill": "token"}.items():
            if getattr(self, name) and self.method not in (method, None):
                raise ConfigError(f"{name} is for the method {method!r}, not for {self.method!r}")
        if self.method == "mixture":
            self.cut  # noqa: B018  # checks its fields
            return
        for name in ("top_k", "top_p", "min_p"):
            if getattr(self, name) is not None and self.method is not None:
                raise ConfigError(
                    f"{name} needs probabilities of tokens, which a CALM model has with the method 'mixture' only"
                )
        warm = isinstance(self.temperature, int | float) and self.temperature > 1
        if not (warm and self.method is None):  # a chain can be warmed: `of` knows
            inverse(self.temperature)

    def of(self, config: CalmFields) -> "Sampling":
        """With the method that suits a model, where none was named."""
        method = self.method
        if method is None:
            sharpened = self.cut != Cut()  # at temperature 1 a single draw is right
            method = "mixture" if config.is_chain and sharpened else "token"
        if config.is_chain and method == "noise":
            raise ConfigError("a model with a chain head has no noise to scale; take the method 'mixture'")
        exact = config.is_chain and method == "mixture"  # its softmaxes are known without candidates
        return replace(self, method=method, num_candidates=1 if exact else self.num_candidates)

    @property
    def number(self) -> int:
        return self.num_candidates or NUMBERS.get(self.method, MANY)

    @property
    def draws(self) -> int:
        """Of a chunk, at most."""
        single = self.method == "noise" or (self.temperature == 1 and self.method != "mixture")
        return 1 if single else self.number

    @property
    def cut(self) -> Cut:
        return Cut(self.temperature, self.top_k, self.top_p, self.min_p)


class Chosen(NamedTuple):
    chunks: Tensor  # (B, K)
    cost: Cost
    agreement: Tensor | None = None  # (B,): share of the candidates that are the chosen chunk, or its probability
    log_probabilities: Tensor | None = None  # (B, K): of the method "mixture"


class ModelCandidates(Candidates):
    """Chunks that a model draws behind hidden states (B, H); a row that grows takes noise of its own alone."""

    def __init__(self, model: CalmNetwork, search: VocabularySearch, hidden: Tensor, noise: RowNoise, count: int):
        self.model, self.search, self.hidden, self.noise = model, search, hidden, noise
        super().__init__(torch.empty(len(hidden), 0, model.config.chunk_size, dtype=torch.long, device=hidden.device))
        self.grow(count, torch.ones(len(hidden), dtype=torch.bool, device=hidden.device))

    def drawn(self, count: int, rows: Tensor) -> Tensor:
        chunks = self.known.new_zeros(len(rows), count, self.known.shape[-1])
        noise = self.noise.rows(rows.nonzero()[:, 0].tolist())
        chunks[rows] = self.model.draw(self.hidden[rows], count, noise, self.search).transpose(0, 1)
        return chunks


class LatentCandidates(ModelCandidates):
    """What the head draws as latents is decoded token by token, when asked."""

    def __init__(self, model: CalmNetwork, search: VocabularySearch, hidden: Tensor, noise: RowNoise, count: int):
        self.states = hidden.new_empty(len(hidden), 0, model.config.autoencoder_config.hidden_size)
        super().__init__(model, search, hidden, noise, count)

    def drawn(self, count: int, rows: Tensor) -> Tensor:
        states = self.states.new_zeros(len(rows), count, self.states.shape[-1])
        latents = self.model.draw_latents(self.hidden[rows], count, self.noise.rows(rows.nonzero()[:, 0].tolist()))
        states[rows] = self.model.autoencoder.decoder.chunk_states(latents.transpose(0, 1))
        self.states = torch.cat([self.states, states], dim=1)  # (B, N, d)
        return self.known.new_full((len(rows), count, self.known.shape[-1]), UNKNOWN)

    def decode(self, places: tuple[Tensor, ...], first: int, last: int) -> Tensor:
        states = self.model.autoencoder.decoder.token_states(self.states[places], first, last)
        return self.search(states.flatten(0, 1)).unflatten(0, (-1, last - first))

    def log_probabilities(self, chosen: list[Tensor]) -> Tensor:
        """Of all candidates and words at the next position: (B, N, V)."""
        position = len(chosen)
        states = self.model.autoencoder.decoder.token_states(self.states, position, position + 1)[..., 0, :]
        return linear(states, self.search.words).float().log_softmax(-1)


def softmaxes(model: CalmNetwork, search: VocabularySearch, hidden: Tensor, noise: RowNoise, count: int) -> Softmaxes:
    """The distributions of the next tokens: of so many latents, or the one of a chain."""
    if not model.config.is_chain:
        return LatentCandidates(model, search, hidden, noise, count).log_probabilities

    def log_probabilities(chosen: list[Tensor]) -> Tensor:
        before = torch.stack(chosen, dim=-1) if chosen else torch.empty(len(hidden), 0).to(hidden.device, torch.long)
        return (
            word_products(model.next_state(hidden, before), model.words).float().log_softmax(-1)[:, None]
        )  # (B, 1, V)

    return log_probabilities


def next_chunks(
    model: CalmNetwork, search: VocabularySearch, hidden: Tensor, sampling: Sampling, noise: RowNoise
) -> Chosen:
    """A chunk behind each hidden state (B, H)."""

    def draw(count: int) -> ModelCandidates:
        kind = ModelCandidates if model.config.is_chain else LatentCandidates
        return kind(model, search, hidden, noise, count)

    if sampling.method == "mixture":
        return _mixture(model, search, hidden, sampling, noise)
    if sampling.temperature == 1 or sampling.method == "noise":
        source = ScaledNoise(noise, sampling.temperature) if sampling.method == "noise" else noise
        chunks = model.draw(hidden, 1, source, search)[0]
        return Chosen(chunks, sure(torch.ones_like(chunks[:, 0])))
    s = inverse(sampling.temperature)
    if sampling.method == "exact":
        return _exactly(model, search, hidden, sampling, noise)
    if sampling.method == "token":
        pool, fewest = draw(sampling.number), math.ceil(s) if sampling.refill else 0
        chunks, cost = sample_token_by_token(pool, s, generator=noise, refill=sampling.number, fewest=fewest)
    elif sampling.tolerance:
        pool = draw(min(BLOCK, sampling.number))
        unsettled = grow_until_settled(pool, s, sampling.number, sampling.tolerance, BLOCK)
        chunks, cost = sample_from_candidates(pool, s, generator=noise)
        cost = cost._replace(unsettled=unsettled)
    else:
        pool = draw(sampling.number)
        chunks, cost = sample_from_candidates(pool, s, generator=noise)
    return Chosen(chunks, cost, _agreement(pool, chunks))


def _mixture(
    model: CalmNetwork, search: VocabularySearch, hidden: Tensor, sampling: Sampling, noise: RowNoise
) -> Chosen:
    """As many rows at a time as there is room for their softmaxes."""
    size, count = model.config.chunk_size, sampling.number
    at_once = max(1, ROOM // (count * model.config.vocab_size))
    chunks, logs = [], []
    for first in range(0, len(hidden), at_once):
        rows = hidden[first : first + at_once]
        own = noise.rows(list(range(first, first + len(rows))))
        of_each = softmaxes(model, search, rows, own, count)
        uniform = draw_uniform(own, rows, 1, size)[0]
        found = sample_mixture(of_each, size, sampling.cut, uniform)
        chunks.append(found[0])
        logs.append(found[1])
    draws = torch.full((len(hidden),), count, device=hidden.device)
    log_probabilities = torch.cat(logs)
    return Chosen(torch.cat(chunks), sure(draws), log_probabilities.sum(1).exp(), log_probabilities)


def _exactly(
    model: CalmNetwork, search: VocabularySearch, hidden: Tensor, sampling: Sampling, noise: RowNoise
) -> Chosen:
    """Algorithm 1, row for row: each takes as many draws as it needs."""
    chunks, costs = [], []
    for row in range(len(hidden)):
        own = noise.rows([row])

        def draw(count: int, row: int = row, own: RowNoise = own) -> Tensor:
            return model.draw(hidden[row : row + 1], count, own, search)[:, 0]

        chunk, cost = sample_at_temperature(
            draw, sampling.temperature, generator=own.generators[0], most_draws=sampling.number
        )
        chunks.append(chunk)
        costs.append(cost)
    return Chosen(
        torch.stack(chunks), Cost(*(torch.cat(parts).to(hidden.device) for parts in zip(*costs, strict=True)))
    )


def sure(draws: Tensor) -> Cost:
    return Cost(draws, torch.zeros_like(draws), torch.zeros_like(draws, dtype=torch.bool))


def _agreement(pool: Candidates, chunks: Tensor) -> Tensor:
    """The share of the chosen chunk; where it was taken for want of others it is the only one."""
    same = (pool.known == chunks[:, None]).all(-1) & pool.there
    return same.sum(1).clamp(min=1) / pool.there.sum(1)
