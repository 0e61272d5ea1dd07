"""The next chunk of each sequence at a temperature: which method, on which draws of a head.

token     one token after the other, by its frequency among the candidates that agree so far
batch     Algorithm 2: whole chunks, by their frequency among the candidates
exact     Algorithm 1: rejection sampling until the distribution is exact, up to a limit of draws
mixture   token probabilities, averaged over draws; also top-k, top-p, and min-p
noise     a heuristic (§8): one draw whose noise is scaled by the temperature
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from calm.errors import ConfigError, did_you_mean
from calm.generate.mixture import LogitsProcessor, sample_mixture
from calm.generate.rejection import MAX_DRAWS, sample_at_temperature
from calm.generate.temperature import (
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
        temperature: in (0, 1]; above 1 only with the method "mixture" and for heads with token probabilities.
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
        warm = isinstance(self.temperature, int | float) and self.temperature > 1
        if not (warm and self.method is None):  # heads with token probabilities allow it: `resolve` knows
            inverse(self.temperature)

    def resolve(self, head: Head) -> "SamplingParams":
        """With the method that suits a head, if none was named; what it does not support is refused."""
        sharpened = (self.temperature, self.top_k, self.top_p, self.min_p) != (1.0, None, None, None)
        method: Method = self.method or head.default_method(sharpened)  # pyright: ignore[reportAssignmentType]
        if method not in head.methods:
            raise ConfigError(
                f"the method {method!r} is not available for this model: {head.unavailable}; "
                f"use {', '.join(head.methods)}"
            )
        if head.methods == ("mixture",) and self.method is None and self.num_candidates is not None:
            raise ConfigError("num_candidates has no effect: this model has token probabilities and needs one draw")
        resolved = replace(self, method=method)
        exact = head.exact_likelihood and method == "mixture"  # one draw knows the whole distribution
        return replace(resolved, num_candidates=1) if exact else resolved

    @property
    def number(self) -> int:
        """Candidates per chunk."""
        return self.num_candidates or DEFAULT_BY_METHOD.get(self.method, DEFAULT_CANDIDATES)

    @property
    def draws(self) -> int:
        """Draws per chunk, at most."""
        single = self.method == "noise" or (self.temperature == 1 and self.method != "mixture")
        return 1 if single else self.number

    @property
    def processor(self) -> LogitsProcessor:
        return LogitsProcessor(self.temperature, self.top_k, self.top_p, self.min_p)


class SampleOutput(NamedTuple):
    chunks: Tensor  # (B, K)
    stats: SamplingStats
    agreement: Tensor | None = None  # (B,): share of the candidates that equal the chunk, or its probability
    log_probs: Tensor | None = None  # (B, K), if the method has them


class ProposedCandidates(Candidates):
    """Candidates that a head proposes for hidden states (B, H). Each row draws from its own noise alone."""

    def __init__(self, head: Head, hidden: Tensor, noise: RowNoise, count: int):
        self.head, self.hidden, self.noise = head, hidden, noise
        self.blocks: list[tuple[int, Tensor, Proposals]] = []  # first number, index of each row, proposals
        super().__init__(torch.empty(len(hidden), 0, head.chunk_size, dtype=torch.long, device=hidden.device))
        self.grow(count, torch.ones(len(hidden), dtype=torch.bool, device=hidden.device))

    def draw_more(self, count: int, rows: Tensor) -> Tensor:
        proposals = self.head.propose(self.hidden[rows], count, self.noise.rows(rows.nonzero()[:, 0].tolist()))
        self.blocks.append((self.known.shape[1], rows.cumsum(0) - 1, proposals))
        chunks = self.known.new_full((len(rows), count, self.known.shape[-1]), UNKNOWN)
        if not proposals.lazy:
            chunks[rows] = proposals.tokens().transpose(0, 1)
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


@torch.no_grad()
def sample_chunks(head: Head, hidden: Tensor, params: SamplingParams, noise: RowNoise) -> SampleOutput:
    """Sample the next chunk for hidden states (B, H).

    Args:
        head: the model's head.
        hidden: (B, H).
        params: resolved for this head.
        noise: one generator per row.
    """
    if params.temperature == 1 and params.method not in ("mixture", "noise"):
        return _single_draw(head, hidden, noise)
    return METHODS[params.method or "token"](head, hidden, params, noise)


def _single_draw(head: Head, hidden: Tensor, noise: RowNoise) -> SampleOutput:
    chunks = head.propose(hidden, 1, noise).tokens()[0]
    return SampleOutput(chunks, _settled(torch.ones_like(chunks[:, 0])))


def _noise(head: Head, hidden: Tensor, params: SamplingParams, noise: RowNoise) -> SampleOutput:
    return _single_draw(head, hidden, ScaledNoise(noise, params.temperature))


def _token(head: Head, hidden: Tensor, params: SamplingParams, noise: RowNoise) -> SampleOutput:
    s, pool = inverse(params.temperature), ProposedCandidates(head, hidden, noise, params.number)
    fewest = math.ceil(s) if params.refill else 0
    chunks, stats = sample_token_by_token(pool, s, generator=noise, refill=params.number, fewest=fewest)
    return SampleOutput(chunks, stats, _agreement(pool, chunks))


def _batch(head: Head, hidden: Tensor, params: SamplingParams, noise: RowNoise) -> SampleOutput:
    s, unsettled = inverse(params.temperature), None
    at_once = min(BLOCK, params.number) if params.tolerance else params.number
    pool = ProposedCandidates(head, hidden, noise, at_once)
    if params.tolerance:
        unsettled = grow_until_settled(pool, s, params.number, params.tolerance, BLOCK)
    chunks, stats = sample_from_candidates(pool, s, generator=noise)
    if unsettled is not None:
        stats = stats._replace(unsettled=unsettled)
    return SampleOutput(chunks, stats, _agreement(pool, chunks))


def _mixture(head: Head, hidden: Tensor, params: SamplingParams, noise: RowNoise) -> SampleOutput:
    """As many rows at a time as memory holds the softmaxes of."""
    rows = max(1, MIXTURE_ELEMENTS // (params.number * head.vocab_size))
    parts = []
    for first in range(0, len(hidden), rows):
        here = hidden[first : first + rows]
        own = noise.rows(list(range(first, first + len(here))))
        proposals = head.propose(here, params.number, own)
        uniform = draw_uniform(own, here, 1, head.chunk_size)[0]
        parts.append(sample_mixture(proposals.log_probs, head.chunk_size, params.processor, uniform))
    chunks, log_probs = (torch.cat(part) for part in zip(*parts, strict=True))
    draws = torch.full((len(hidden),), params.number, device=hidden.device)
    return SampleOutput(chunks, _settled(draws), log_probs.sum(1).exp(), log_probs)


def _exact(head: Head, hidden: Tensor, params: SamplingParams, noise: RowNoise) -> SampleOutput:
    """Algorithm 1, row by row: each takes as many draws as it needs."""
    chunks, stats = [], []
    for row in range(len(hidden)):
        own = noise.rows([row])

        def draw(count: int, row: int = row, own: RowNoise = own) -> Tensor:
            return head.propose(hidden[row : row + 1], count, own).tokens()[:, 0]

        chunk, cost = sample_at_temperature(
            draw, params.temperature, generator=own.generators[0], max_draws=params.number
        )
        chunks.append(chunk)
        stats.append(cost)
    together = (torch.cat(parts).to(hidden.device) for parts in zip(*stats, strict=True))
    return SampleOutput(torch.stack(chunks), SamplingStats(*together))


METHODS: dict[Method, Callable[[Head, Tensor, SamplingParams, RowNoise], SampleOutput]] = {
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
    return same.sum(1).clamp(min=1) / pool.valid.sum(1)
