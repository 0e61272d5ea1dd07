"""Temperature without likelihoods (§5): from draws of P alone to P(x)^(1/T), normalised.

    sample_from_candidates  Algorithm 2: of N candidates, chunks that occur c times weigh C(c, n), T = 1/n
    sample_token_by_token   the same for one token after the other, as a softmax model applies temperature

Both converge as N grows; rejection.py is exact. For T that is no 1/n they take the gamma function's binomial: an
unbiased estimate of p^s exists only for whole s (it is a polynomial in p), so there even the weights are right only in
the limit.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from calm.errors import ConfigError
from calm.noise import Source, draw_uniform, pick
from calm.sampling.candidates import Candidates

WHOLE = 1e-9  # 1/T that is so close to an integer is that integer
COLDEST = 1e-9  # below, 1/T is no number to count with
REFILLS = 4  # how often a row whose candidates run out may ask for as many again


class Cost(NamedTuple):
    """What a choice cost, for each row (B,)."""

    draws: Tensor  # candidates that were used
    fallbacks: Tensor  # how often n had to be lowered by one
    unsettled: Tensor  # true where a limit came before the goal


def inverse(temperature: float) -> float:
    """1/T of a temperature in (0, 1]."""
    if not isinstance(temperature, int | float) or not COLDEST <= temperature <= 1:
        small = isinstance(temperature, int | float) and 0 <= temperature < COLDEST
        remedy = "; for the likeliest text take a small one, like 0.1" if small else ""
        raise ConfigError(f"temperature must be above 0 and at most 1, not {temperature}{remedy}")
    s = 1 / temperature
    return float(round(s)) if abs(s - round(s)) <= WHOLE else s


def sample_from_candidates(
    candidates: Tensor | Candidates, inverse_temperature: float, *, generator: Source = None
) -> tuple[Tensor, Cost]:
    """Algorithm 2: one of the candidates (B, N, K) of each row, (B, K), and what it cost.

    Where no chunk occurs n times, n is lowered until one does; at 1 every candidate is as good as any other.
    """
    pool = _pool(candidates)
    wanted = _exponents(pool, inverse_temperature)
    weights = pool.there.double()  # the fallback's end: all the same
    exponent = wanted.clone()  # (B,)
    looking = exponent > 1
    while bool(looking.any()):
        count, most = chunk_counts(pool, looking, exponent)
        found = looking & (count > 0).any(1)
        weights = torch.where(found[:, None], _weights(count, exponent), weights)
        exponent = torch.where(looking & ~found, most.double(), exponent)  # between them nothing can be found
        looking = looking & ~found & (exponent > 1)
    uniform = draw_uniform(generator, pool.known[:, 0], 1, 1)[0]  # (B, 1)
    rows = torch.arange(len(weights), device=weights.device)
    chunks = pool.rest(0, (rows, pick(weights, uniform)[:, 0]))
    return chunks, Cost(pool.there.sum(1), (wanted - exponent).ceil().long(), torch.zeros_like(looking))


def sample_token_by_token(
    candidates: Tensor | Candidates,
    inverse_temperature: float,
    *,
    generator: Source = None,
    refill: int = 0,
    fewest: int = 0,
) -> tuple[Tensor, Cost]:
    """A token by its weight among the candidates, then the next among those that begin with it: (B, K), and the cost.

    As N grows this is the product of P(x_k | x_<k)^(1/T), normalised at each k. A row with fewer than `fewest`
    candidates left draws `refill` more, some times; those that begin with the chosen tokens join.
    """
    pool = _pool(candidates)
    wanted = _exponents(pool, inverse_temperature)
    size = pool.known.shape[-1]
    uniform = draw_uniform(generator, pool.known[:, 0], 1, size)[0]  # (B, K)
    live, chosen = pool.there.clone(), []
    fallbacks, unsettled = torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    for k in range(size):
        for _ in range(REFILLS if k else 0):
            if not bool((few := live.sum(1) < fewest).any()):
                break
            pool.grow(refill, few)
            live = _agreeing(pool, live, chosen)
        unsettled |= live.sum(1) < fewest
        places = live.nonzero(as_tuple=True)
        if len(places[0]) == len(live) and (fewest <= 1 or k == 0):  # one in each row: nothing is left to choose
            chosen += pool.rest(k, places).unbind(1)
            fallbacks += (size - k) * (wanted - 1).ceil()
            break
        _, number = _regroup(places[0], pool.tokens(k, places))
        count = torch.zeros_like(live, dtype=torch.double).masked_scatter_(live, number.double())
        exponent = wanted.minimum(count.amax(1))
        fallbacks += (wanted - exponent).ceil()
        place = pick(_weights(count, exponent), uniform[:, k : k + 1])  # (B, 1)
        chosen.append(pool.known[..., k].gather(1, place)[:, 0])
        live = live & (pool.known[..., k] == chosen[-1][:, None])
    return torch.stack(chosen, dim=-1), Cost(pool.there.sum(1), fallbacks.long(), unsettled)


def _agreeing(pool: Candidates, live: Tensor, chosen: list[Tensor]) -> Tensor:
    """Those that were live, and of the new ones those that begin with the chosen tokens."""
    new = pool.there.clone()
    new[:, : live.shape[1]] = False
    for k, token in enumerate(chosen):
        places = new.nonzero(as_tuple=True)
        new[places] = pool.tokens(k, places) == token[places[0]]
    new[:, : live.shape[1]] = live
    return new


def grow_until_settled(
    pool: Candidates, inverse_temperature: float, num_candidates: int, tolerance: float, block: int
) -> Tensor:
    """Give each row candidates in blocks, up to `num_candidates`, until more would hardly change Algorithm 2's answer.

    Settled is a row whose distribution over chunks is expected to be within `tolerance` (total variation) of the one
    that endless candidates would give. Returns which rows (B,) never were.
    """
    unsettled, exponent = pool.there.any(1), _exponents(pool, inverse_temperature)
    while True:
        count, _ = chunk_counts(pool, unsettled, exponent)
        unsettled = unsettled & ~(expected_error(pool, count, inverse_temperature) <= tolerance)
        room = num_candidates - int(pool.there[unsettled].sum(1).max()) if bool(unsettled.any()) else 0
        if room <= 0:
            return unsettled
        pool.grow(min(block, room), unsettled)


def expected_error(pool: Candidates, count: Tensor, exponent: float) -> Tensor:
    """How far Algorithm 2's distribution is expected to be from its limit (B,); infinite where no chunk is left.

    A share p of M draws has the variance p(1-p)/M, and a chunk's weight goes with its share to the power 1/T: to first
    order that gives every probability a standard deviation. One more chunk, unseen, counts as seen once, so that
    agreement in a first small block is not taken for certainty.
    """
    drawn = pool.there.sum(1, keepdim=True).double()  # (B, 1)
    live = count > 0
    weights = _weights(count, torch.full_like(drawn[:, 0], exponent))  # of each candidate, so of each chunk c times
    w = torch.where(live, weights * count, 0)  # of the chunk
    each = torch.where(live, 1 / count.clamp(min=1), 0)  # sums over candidates with it are sums over chunks
    total = (w * each).sum(1, keepdim=True)
    w = w / total.clamp(min=torch.finfo(torch.double).tiny)
    p = count / (drawn + 1)
    spread = (w.square() / p.clamp(min=1e-300) * each).sum(1, keepdim=True) + 1 / (drawn + 1)
    variance = torch.where(live, (1 - 2 * w) / p.clamp(min=1e-300), 0) + spread
    scale = exponent * (2 / math.pi / drawn).sqrt()  # 2/pi: from the standard deviation to the mean distance
    error = 0.5 * scale[:, 0] * (w * variance.clamp(min=0).sqrt() * each).sum(1)
    return torch.where(live.any(1), error, torch.inf)


def chunk_counts(pool: Candidates, rows: Tensor, fewest: Tensor) -> tuple[Tensor, Tensor]:
    """How often each candidate's chunk occurs in its row, 0 where that is fewer than `fewest` (B,): (B, N).

    Also the largest number that is still possible for a row where none is found (B,). A chunk occurs no more often than
    its beginning does, so what is too rare is left behind token by token.
    """
    live = pool.there & rows[:, None]
    row = torch.arange(len(rows), device=rows.device)[:, None].expand_as(live)
    group, most = row, torch.zeros_like(rows, dtype=torch.long)
    number = torch.zeros_like(row)
    for k in range(pool.known.shape[-1]):
        places = live.nonzero(as_tuple=True)
        found, often = _regroup(group[places], pool.tokens(k, places))
        group = torch.zeros_like(row).masked_scatter_(live, found)
        number = torch.zeros_like(row).masked_scatter_(live, often)
        rare = live & (number < fewest[:, None])
        most = most.maximum(torch.where(rare, number, 0).amax(1))
        live = live & ~rare
    return torch.where(live, number, 0).double(), most


def _regroup(groups: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Groups (n,) split by token, and the size of each one's new group."""
    if not len(groups):
        return groups, groups
    keys = groups * (int(tokens.max()) + 1) + tokens
    _, split, sizes = torch.unique(keys, return_inverse=True, return_counts=True)
    return split, sizes[split]


def _weights(count: Tensor, exponent: Tensor) -> Tensor:
    """Of each candidate (B, N), so that all c of a chunk together weigh C(c, exponent); 0 where c is smaller."""
    m = exponent[:, None]
    enough = (count >= m) & (count > 0)
    c = torch.where(enough, count, m)
    logs = (c + 1).lgamma() - (m + 1).lgamma() - (c - m + 1).lgamma() - c.log()
    logs = torch.where(enough, logs, -torch.inf)
    return (logs - logs.amax(1, keepdim=True).clamp(min=-1e300)).exp()


def _pool(candidates: Tensor | Candidates) -> Candidates:
    pool = Candidates(candidates) if isinstance(candidates, Tensor) else candidates
    if pool.known.ndim != 3 or not pool.known.shape[1]:
        raise ConfigError(f"candidates should have the shape (B, N, K), N at least 1, not {tuple(pool.known.shape)}")
    return pool


def _exponents(pool: Candidates, inverse_temperature: float) -> Tensor:
    if not 1 <= inverse_temperature < math.inf:
        raise ConfigError(f"1/T must be at least 1 and finite, not {inverse_temperature}")
    return torch.full((len(pool.known),), inverse_temperature, dtype=torch.double, device=pool.known.device)
