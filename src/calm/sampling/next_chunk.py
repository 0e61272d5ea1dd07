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

from calm.errors import ConfigError, UserError, did_you_mean
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import CalmConfig
from calm.noise import RowNoise, ScaledNoise, draw_uniform
from calm.sampling.candidates import UNKNOWN, Candidates
from calm.sampling.mixture import Cut, sample_mixture
from calm.sampling.rejection import sample_at_temperature
from calm.sampling.temperature import (
    Cost,
    grow_until_settled,
    inverse,
    sample_from_candidates,
    sample_token_by_token,
)
from calm.sampling.vocabulary import VocabularySearch
from calm.scores.vocabulary import drawn_words

Method = Literal["token", "batch", "exact", "mixture", "noise"]
MANY, FEW = 200, 64  # candidates: those that are counted, those whose softmaxes are averaged
ROOM = 2**26  # probabilities held at once
BLOCK = 25  # candidates that are drawn at once where a tolerance may spare the rest


@dataclass(frozen=True)
class Sampling:
    """How chunks are chosen."""

    temperature: float = 1.0
    num_candidates: int | None = None  # N; by default 200, and 64 for "mixture"
    method: Method | None = None  # by default "token", and "mixture" for a model that draws its tokens
    tolerance: float = 0.0  # of "batch": the total variation at which no more candidates are drawn; 0 is all of them
    refill: bool = False  # of "token": draw anew where fewer than 1/T candidates agree with the tokens so far
    caution: float = 1.0  # of the vocabulary search: below 1 it is faster and almost always right
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
        if not 0 < self.caution <= 1:
            raise ConfigError(f"caution must be above 0 and at most 1, which is exact, not {self.caution}")
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
        inverse(self.temperature)

    def of(self, config: CalmConfig) -> "Sampling":
        """With the method that suits a model, where none was named."""
        if self.method is not None:
            return self
        sharpened = self.cut != Cut()  # at temperature 1 a single draw is right
        return replace(self, method="mixture" if config.draws_tokens and sharpened else "token")

    @property
    def number(self) -> int:
        return self.num_candidates or (FEW if self.method == "mixture" else MANY)

    @property
    def cut(self) -> Cut:
        return Cut(self.temperature, self.top_k, self.top_p, self.min_p)


class Chosen(NamedTuple):
    chunks: Tensor  # (B, K)
    cost: Cost
    agreement: Tensor | None = None  # (B,): share of the candidates that are the chosen chunk
    log_probabilities: Tensor | None = None  # (B, K): of the method "mixture"


class LatentCandidates(Candidates):
    """What the head of a model draws behind hidden states (B, H); decoded token by token, when asked."""

    def __init__(self, model: CalmForCausalLM, search: VocabularySearch, hidden: Tensor, noise: RowNoise, count: int):
        self.model, self.search, self.hidden, self.noise = model, search, hidden, noise
        self.states = hidden.new_empty(len(hidden), 0, model.config.autoencoder_config.hidden_size)
        size = model.config.chunk_size
        none = torch.empty(len(hidden), 0, size, dtype=torch.float32, device=hidden.device)
        self.uniform = none if model.readout is not None else None  # (B, N, K): what tokens are drawn by
        super().__init__(none.long())
        self.grow(count, torch.ones(len(hidden), dtype=torch.bool, device=hidden.device))

    def drawn(self, count: int, rows: Tensor) -> Tensor:
        states = self.states.new_zeros(len(rows), count, self.states.shape[-1])
        noise = self.noise.rows(rows.nonzero()[:, 0].tolist())
        latents = draw_latents(self.model, self.hidden[rows], count, noise)
        states[rows] = self.model.autoencoder.decoder.chunk_states(latents.transpose(0, 1))
        self.states = torch.cat([self.states, states], dim=1)  # (B, N, d)
        if self.uniform is not None:
            uniform = self.uniform.new_zeros(len(rows), count, self.known.shape[-1])
            uniform[rows] = draw_uniform(noise, self.hidden[rows], count, uniform.shape[-1]).transpose(0, 1)
            self.uniform = torch.cat([self.uniform, uniform], dim=1)  # (B, N, K)
        return self.known.new_full((len(rows), count, self.known.shape[-1]), UNKNOWN)

    def decode(self, places: tuple[Tensor, ...], first: int, last: int) -> Tensor:
        states = self.model.token_states(self.states[places], self.hidden[places[0]], first, last).flatten(0, 1)
        if self.uniform is None:
            found = self.search(states)
        else:
            found = drawn_words(states, self.search.words, self.uniform[places][:, first:last].flatten())
        return found.unflatten(0, (-1, last - first))

    def log_probabilities(self, position: int) -> Tensor:
        """Of all candidates and words: (B, N, V)."""
        states = self.model.token_states(self.states, self.hidden[:, None], position, position + 1)[..., 0, :]
        return (states @ self.search.words.T).float().log_softmax(-1)


def next_chunks(
    model: CalmForCausalLM, search: VocabularySearch, hidden: Tensor, sampling: Sampling, noise: RowNoise
) -> Chosen:
    """A chunk behind each hidden state (B, H)."""

    def draw(count: int) -> LatentCandidates:
        return LatentCandidates(model, search, hidden, noise, count)

    if sampling.method == "mixture":
        return _mixture(model, search, hidden, sampling, noise)
    if sampling.temperature == 1 or sampling.method == "noise":
        source = ScaledNoise(noise, sampling.temperature) if sampling.method == "noise" else noise
        latents = draw_latents(model, hidden, 1, source)
        chunks = model.tokens(latents, hidden, noise, search)[0]
        return Chosen(chunks, _sure(torch.ones_like(chunks[:, 0])))
    s = inverse(sampling.temperature)
    if sampling.method == "exact":
        return _exactly(model, search, hidden, sampling.temperature, noise)
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
    model: CalmForCausalLM, search: VocabularySearch, hidden: Tensor, sampling: Sampling, noise: RowNoise
) -> Chosen:
    """As many rows at a time as there is room for their softmaxes."""
    size, count = model.config.chunk_size, sampling.number
    at_once = max(1, ROOM // (count * model.config.vocab_size))
    chunks, logs = [], []
    for first in range(0, len(hidden), at_once):
        rows = hidden[first : first + at_once]
        own = noise.rows(list(range(first, first + len(rows))))
        pool = LatentCandidates(model, search, rows, own, count)
        uniform = draw_uniform(own, rows, 1, size)[0]
        found = sample_mixture(pool.log_probabilities, size, sampling.cut, uniform)
        chunks.append(found[0])
        logs.append(found[1])
    draws = torch.full((len(hidden),), count, device=hidden.device)
    return Chosen(torch.cat(chunks), _sure(draws), log_probabilities=torch.cat(logs))


def _exactly(
    model: CalmForCausalLM, search: VocabularySearch, hidden: Tensor, temperature: float, noise: RowNoise
) -> Chosen:
    """Algorithm 1, row for row: each takes as many draws as it needs."""
    chunks, costs = [], []
    for row in range(len(hidden)):
        own = noise.rows([row])

        def draw(count: int, row: int = row, own: RowNoise = own) -> Tensor:
            here = hidden[row : row + 1]
            return model.tokens(draw_latents(model, here, count, own), here, own, search)[:, 0]

        chunk, cost = sample_at_temperature(draw, temperature, generator=own.generators[0])
        chunks.append(chunk)
        costs.append(cost)
    return Chosen(
        torch.stack(chunks), Cost(*(torch.cat(parts).to(hidden.device) for parts in zip(*costs, strict=True)))
    )


def draw_latents(model: CalmForCausalLM, hidden: Tensor, count: int, noise: RowNoise) -> Tensor:
    """Samples of the next latent behind hidden states, checked: (..., H) → (N, ..., Z)."""
    latents = model.head.sample(hidden, count, noise)
    if not bool(latents.isfinite().all()):
        raise UserError("the model's samples are not finite numbers: its weights are damaged")
    return latents


def _sure(draws: Tensor) -> Cost:
    return Cost(draws, torch.zeros_like(draws), torch.zeros_like(draws, dtype=torch.bool))


def _agreement(pool: Candidates, chunks: Tensor) -> Tensor:
    """The share of the chosen chunk; where it was taken for want of others it is the only one."""
    same = (pool.known == chunks[:, None]).all(-1) & pool.there
    return same.sum(1).clamp(min=1) / pool.there.sum(1)
