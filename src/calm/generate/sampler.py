"""The next chunk of each sequence at a temperature: which method, on which draws of a head.

token     one token after the other, by its frequency among the candidates that agree so far
batch     Algorithm 2: whole chunks, by their frequency among the candidates
exact     Algorithm 1: rejection sampling until the distribution is exact, up to a limit of draws
mixture   token probabilities, averaged over draws; also top-k, top-p, and min-p
noise     a heuristic (§8): one draw whose noise is scaled by the temperature
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from calm.errors import ConfigError, did_you_mean
from calm.generate.mixture import LogitsProcessor, sample_mixture
from calm.generate.rejection import MAX_DRAWS, sample_by_rejection
from calm.generate.temperature import (
    MIN_TEMPERATURE,
    UNKNOWN,
    Candidates,
    SamplingStats,
    grow_until_settled,
    inverse,
    sample_from_candidates,
    sample_token_by_token,
)
from calm.heads import Head, Proposals
from calm.noise import RowNoise, ScaledNoise, draw_uniform

Method = Literal["token", "batch", "exact", "mixture", "noise"]
DEFAULT_CANDIDATES = 200
DEFAULT_BY_METHOD: dict[Method | None, int] = {"mixture": 64, "exact": MAX_DRAWS}
MIXTURE_ELEMENTS = 2**26  # probabilities held at once
BLOCK = 25  # candidates drawn at once if a tolerance may make the rest unnecessary


@dataclass(frozen=True)
class SamplingParams:
    """How chunks are sampled.

    Args:
        temperature: in (0, 1]; above 1 only with the method "mixture" and for heads with token probabilities. 0 selects
            the most probable tokens with "mixture", the most frequent candidates with "token" and "batch", and no
            noise with "noise".
        num_candidates: N, draws per chunk; by default 200, and 64 for "mixture". The limit of draws for "exact".
        method: see above; by default the one that suits the model's head.
        tolerance: for "batch": total variation at which no more candidates are drawn; 0: always draw all.
        refill: for "token": draw again if fewer than 1/T candidates agree with the tokens so far.
        top_k, top_p, min_p: truncation, for models with token probabilities and for "mixture".
    """

    temperature: float = 1.0
    num_candidates: int | None = None
    method: Method | None = None
    tolerance: float = 0.0
    refill: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        known = get_args(Method)
        if self.method is not None and self.method not in known:
            raise ConfigError(f"method must be one of {', '.join(known)}{did_you_mean(self.method, known)}")
        if self.num_candidates is not None and (not isinstance(self.num_candidates, int) or self.num_candidates < 1):
            raise ConfigError(f"num_candidates must be an integer of at least 1, not {self.num_candidates}")
        if not 0 <= self.tolerance <= 1:
            raise ConfigError(f"tolerance is a total variation, from 0 to 1, not {self.tolerance}")
        for name, method in {"tolerance": "batch", "refill": "token"}.items():
            if getattr(self, name) and self.method not in (method, None):
                raise ConfigError(f"{name} is for the method {method!r}, not for {self.method!r}")
        if self.method == "mixture":
            self.processor  # noqa: B018  # checks its fields
            return
        for name in ("top_k", "top_p", "min_p"):
            if getattr(self, name) is not None and self.method is not None:
                raise ConfigError(f"{name} needs token probabilities: use the method 'mixture', not {self.method!r}")
        if self.temperature == 0:
            if self.method == "exact":
                raise ConfigError("temperature must be above 0 with the method 'exact', not 0; use 'token'")
            return
        warm = isinstance(self.temperature, int | float) and self.temperature > 1
        if warm and self.method is None:  # heads with token probabilities allow it: `resolve` knows
            return
        if warm:
            raise ConfigError(
                f"temperature must be above 0 and at most 1, not {self.temperature}, with the method {self.method!r}; "
                "use the method 'mixture'"
            )
        inverse(self.temperature)

    def resolve(self, head: Head) -> "SamplingParams":
        """With the method that suits a head, if none was named; what it does not support is refused."""
        truncated = any(value is not None for value in (self.top_k, self.top_p, self.min_p))
        method: Any = self.method or head.default_method(self.temperature != 1, truncated)
        if method not in head.methods:
            raise ConfigError(
                f"the method {method!r} is not available for this model: {head.unsupported_reason}; "
                f"use {', '.join(head.methods)}"
            )
        if head.methods == ("mixture",) and self.method is None and self.num_candidates is not None:
            raise ConfigError("num_candidates has no effect: this model has token probabilities and needs one draw")
        resolved = replace(self, method=method)
        if self.temperature == 0:
            greedy = {"temperature": 1.0, "top_k": 1} if method == "mixture" else {"temperature": MIN_TEMPERATURE}
            resolved = replace(resolved, **greedy)
        exact = head.exact_likelihood and method == "mixture"  # one draw knows the whole distribution
        return replace(resolved, num_candidates=1) if exact else resolved

    @property
    def number(self) -> int:
        """Candidates per chunk."""
        return self.num_candidates or DEFAULT_BY_METHOD.get(self.method, DEFAULT_CANDIDATES)

    @property
    def single_draw(self) -> bool:
        """Whether one draw is the chunk."""
        return self.method == "noise" or (self.temperature == 1 and self.method != "mixture")

    @property
    def draws(self) -> int:
        """Draws per chunk, at most."""
        return 1 if self.single_draw else self.number

    @property
    def sampler(self) -> "Sampler":
        """The function that samples with these parameters, once they are resolved."""
        assert self.method is not None
        return _single_draw if self.single_draw and self.method != "noise" else METHODS[self.method]

    @property
    def processor(self) -> LogitsProcessor:
        return LogitsProcessor(1.0 if self.temperature == 0 else self.temperature, self.top_k, self.top_p, self.min_p)


class SampleOutput(NamedTuple):
    """One chunk for each row."""

    chunks: Tensor  # (B, K)
    stats: SamplingStats
    finite: Tensor  # (B,): false if the model's output was not finite; the chunk is then meaningless
    agreement: Tensor  # (B,): share of the candidates that equal the chunk, or its probability; NaN for a single draw

    def at(self, rows: Tensor) -> "SampleOutput":
        """Some rows, in a new order."""
        stats = SamplingStats(*(part[rows] for part in self.stats))
        return SampleOutput(self.chunks[rows], stats, self.finite[rows], self.agreement[rows])


class ProposedCandidates(Candidates):
    """Candidates that a head proposes for hidden states (B, H). Each row draws from its own noise alone."""

    def __init__(self, head: Head, hidden: Tensor, noise: RowNoise, count: int):
        self.head, self.hidden, self.noise = head, hidden, noise
        first = head.propose(hidden, count, noise)
        self.finite, self.lazy = first.finite(), first.lazy
        self.blocks = [(0, torch.arange(len(hidden), device=hidden.device), first)]  # first number, index of each row
        super().__init__(self._known(first, count))

    def _known(self, proposals: Proposals, count: int) -> Tensor:
        if not self.lazy:
            return proposals.tokens().transpose(0, 1)
        size = (len(proposals.finite()), count, self.head.chunk_size)
        return torch.full(size, UNKNOWN, device=self.hidden.device)

    def draw_more(self, count: int, rows: Tensor) -> Tensor:
        places = rows.nonzero()[:, 0]
        proposals = self.head.propose(self.hidden[places], count, self.noise.rows(places.tolist()))
        self.blocks.append((self.known.shape[1], rows.cumsum(0) - 1, proposals))
        self.finite[places] &= proposals.finite()
        chunks = self.known.new_full((len(rows), count, self.known.shape[-1]), UNKNOWN)
        chunks[places] = self._known(proposals, count)
        return chunks

    def decode(self, places: tuple[Tensor, ...], first: int, last: int) -> Tensor:
        rows, numbers = places
        if len(self.blocks) == 1:
            _, index, proposals = self.blocks[0]
            return proposals.tokens_at(numbers, index[rows], first, last)
        tokens = self.known.new_empty(len(rows), last - first)
        starts = torch.tensor([start for start, _, _ in self.blocks], device=numbers.device)
        of_block = torch.searchsorted(starts, numbers, right=True) - 1
        for block, (start, index, proposals) in enumerate(self.blocks):
            here = of_block == block
            if bool(here.any()):
                tokens[here] = proposals.tokens_at(numbers[here] - start, index[rows[here]], first, last)
        return tokens


class Group(NamedTuple):
    """Rows that are sampled together: they differ only in temperature and in the truncation of the distribution."""

    sample: "Sampler"
    rows: list[int]
    places: Tensor  # the same, on the device
    params: list[SamplingParams]
    temperatures: Tensor  # (rows,)
    inverse_temperatures: Tensor  # (rows,)

    @property
    def first(self) -> SamplingParams:
        """For what the rows have in common."""
        return self.params[0]


@lru_cache(maxsize=64)
def _groups(params: tuple[SamplingParams, ...], device: torch.device) -> list[Group]:
    """The groups of a batch; those of the next step are the same, so that nothing is copied to the device again."""
    members: dict[tuple, list[int]] = {}
    for row, own in enumerate(params):
        members.setdefault((own.sampler, own.draws, own.tolerance, own.refill), []).append(row)
    groups = []
    for (sample, *_), rows in members.items():
        chosen = [params[row] for row in rows]
        temperatures = torch.tensor([own.temperature for own in chosen], dtype=torch.double, device=device)
        inverses = [inverse(own.temperature) if own.temperature <= 1 else math.nan for own in chosen]
        inverse_temperatures = torch.tensor(inverses, dtype=torch.double, device=device)
        places = torch.tensor(rows, device=device)
        groups.append(Group(sample, rows, places, chosen, temperatures, inverse_temperatures))
    return groups


@torch.no_grad()
def sample_chunks(head: Head, hidden: Tensor, params: Sequence[SamplingParams], noise: RowNoise) -> SampleOutput:
    """Sample the next chunk for hidden states.

    Args:
        head: the model's head.
        hidden: (B, H).
        params: of each row, resolved for this head.
        noise: one generator per row.
    """
    groups = _groups(tuple(params), hidden.device)
    if len(groups) == 1:
        return groups[0].sample(head, hidden, groups[0], noise)
    outputs = [group.sample(head, hidden[group.places], group, noise.rows(group.rows)) for group in groups]
    chunks, stats, finite, agreement = zip(*outputs, strict=True)
    together = SampleOutput(
        torch.cat(chunks),
        SamplingStats(*(torch.cat(parts) for parts in zip(*stats, strict=True))),
        torch.cat(finite),
        torch.cat(agreement),
    )
    return together.at(torch.cat([group.places for group in groups]).argsort())


def _single_draw(head: Head, hidden: Tensor, group: Group, noise: RowNoise) -> SampleOutput:
    proposals = head.propose(hidden, 1, noise)
    chunks = proposals.tokens()[0]
    one = torch.ones_like(chunks[:, 0])
    return SampleOutput(chunks, _settled(one), proposals.finite(), torch.full_like(one, torch.nan, dtype=torch.double))


def _noise(head: Head, hidden: Tensor, group: Group, noise: RowNoise) -> SampleOutput:
    return _single_draw(head, hidden, group, ScaledNoise(noise, group.temperatures.float()))


def _token(head: Head, hidden: Tensor, group: Group, noise: RowNoise) -> SampleOutput:
    s, number = group.inverse_temperatures, group.first.number
    pool = ProposedCandidates(head, hidden, noise, number)
    refill, fewest = (number, s.ceil()) if group.first.refill else (0, 0)
    chunks, stats = sample_token_by_token(pool, s, generator=noise, refill=refill, fewest=fewest)
    return SampleOutput(chunks, stats, pool.finite, _agreement(pool, chunks))


def _batch(head: Head, hidden: Tensor, group: Group, noise: RowNoise) -> SampleOutput:
    s, number, tolerance = group.inverse_temperatures, group.first.number, group.first.tolerance
    pool = ProposedCandidates(head, hidden, noise, min(BLOCK, number) if tolerance else number)
    unsettled = grow_until_settled(pool, s, number, tolerance, BLOCK) if tolerance else None
    chunks, stats = sample_from_candidates(pool, s, generator=noise)
    if unsettled is not None:
        stats = stats._replace(unsettled=unsettled)
    return SampleOutput(chunks, stats, pool.finite, _agreement(pool, chunks))


def _mixture(head: Head, hidden: Tensor, group: Group, noise: RowNoise) -> SampleOutput:
    """As many rows at a time as memory holds the softmaxes of."""
    number = group.first.number
    rows, parts = max(1, MIXTURE_ELEMENTS // (number * head.vocab_size)), []
    for first in range(0, len(hidden), rows):
        here = hidden[first : first + rows]
        own = noise.rows(list(range(first, first + len(here))))
        proposals = head.propose(here, number, own)
        uniform = draw_uniform(own, here, 1, head.chunk_size)[0]
        process = _processor(tuple(group.params[first : first + rows]), hidden.device)
        chunks, log_probs = sample_mixture(proposals.log_probs, head.chunk_size, process, uniform)
        parts.append((chunks, log_probs, proposals.finite()))
    chunks, log_probs, finite = (torch.cat(part) for part in zip(*parts, strict=True))
    draws = torch.full((len(hidden),), number, device=hidden.device)
    probability = log_probs.double().sum(1).exp()
    return SampleOutput(chunks, _settled(draws), finite & probability.isfinite(), probability)


@lru_cache(maxsize=64)
def _processor(params: tuple[SamplingParams, ...], device: torch.device) -> LogitsProcessor:
    return LogitsProcessor.concat([own.processor for own in params], device)


def _exact(head: Head, hidden: Tensor, group: Group, noise: RowNoise) -> SampleOutput:
    """Algorithm 1, row by row: each takes as many draws as it needs."""
    chunks, stats, finite = [], [], torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    for row, own in enumerate(group.params):
        source = noise.rows([row])

        def draw(count: int, row: int = row, source: RowNoise = source) -> Tensor:
            proposals = head.propose(hidden[row : row + 1], count, source)
            finite[row] &= proposals.finite()[0]
            return proposals.tokens()[:, 0]

        chunk, cost = sample_by_rejection(draw, own.temperature, source.generators[0], max_draws=own.number)
        chunks.append(chunk)
        stats.append(cost)
    together = SamplingStats(
        *(torch.cat([part.to(hidden.device) for part in parts]) for parts in zip(*stats, strict=True))
    )
    return SampleOutput(torch.stack(chunks), together, finite, torch.full_like(finite, torch.nan, dtype=torch.double))


Sampler = Callable[[Head, Tensor, Group, RowNoise], SampleOutput]
METHODS: dict[Method, Sampler] = {
    "token": _token,
    "batch": _batch,
    "exact": _exact,
    "mixture": _mixture,
    "noise": _noise,
}


def _settled(draws: Tensor) -> SamplingStats:
    return SamplingStats(draws, torch.zeros_like(draws), torch.zeros_like(draws, dtype=torch.bool))


def _agreement(pool: Candidates, chunks: Tensor) -> Tensor:
    """Share of the candidates that equal the chunk; at least one does, even if it was never decoded to its end."""
    same = (pool.known == chunks[:, None]).all(-1) & pool.valid
    return same.sum(1).clamp(min=1).double() / pool.valid.sum(1)
