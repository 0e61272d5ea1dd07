"""Temperature without likelihoods (§5): samples of P(x)^(1/T), normalized, from samples of P alone.

    sample_from_candidates  Algorithm 2: among N candidates, a chunk that occurs c times has weight C(c, n), T = 1/n
    sample_token_by_token   the same for one token after the other, as a softmax model applies temperature

Both converge as N grows; rejection.py is exact. If 1/T is not an integer they use the gamma function's binomial. An
unbiased estimate of p^s exists only for integer s (it is a polynomial in p), so there the weights are right only in the
limit.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from calm.errors import ConfigError
from calm.noise import NoiseSource, draw_uniform, pick

INTEGER_TOLERANCE = 1e-9  # a 1/T this close to an integer is that integer
MIN_TEMPERATURE = 1e-9
UNKNOWN = -1  # a token that is not decoded yet
MAX_REFILLS = 4  # per position of a row whose candidates run out


class Candidates:
    """Candidates of B rows, which may have different numbers of them.

    Candidates that are not lazy are handled in tensors of fixed shapes, so that a GPU is never waited for. Lazy ones
    are decoded on demand: a candidate that its first tokens already rule out is never decoded to its end.

    Args:
        tokens: ids (B, N, K).
        draw: draw(n) → (B, n, K), more candidates from a black box; None if there are no more.
    """

    lazy = False

    def __init__(self, tokens: Tensor, draw: Callable[[int], Tensor] | None = None):
        self.known = tokens  # (B, N, K), UNKNOWN if not decoded yet
        self.valid = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)  # (B, N)
        self.draw = draw

    def grow(self, count: int, rows: Tensor) -> None:
        """Draw more candidates for some rows, a mask (B,)."""
        new = self.draw_more(count, rows)  # (B, count, K); other rows may hold anything
        self.known = torch.cat([self.known, new], dim=1)
        self.valid = torch.cat([self.valid, rows[:, None].expand(-1, count)], dim=1)

    def draw_more(self, count: int, rows: Tensor) -> Tensor:
        if self.draw is None:
            raise ConfigError("these candidates cannot be refilled: pass `draw` to Candidates")
        return self.draw(count)

    def tokens(self, position: int, live: Tensor) -> Tensor:
        """Tokens at one position (B, N). Those of live candidates (B, N) are decoded, if need be into `known`."""
        tokens = self.known[..., position]
        if self.lazy and bool((missing := live & (tokens == UNKNOWN)).any()):
            places = missing.nonzero(as_tuple=True)
            tokens[places] = self.decode(places, position, position + 1)[:, 0]
        return tokens

    def chunks(self, numbers: Tensor) -> Tensor:
        """One whole candidate of each row: (B,) → (B, K)."""
        places = torch.arange(len(numbers), device=numbers.device), numbers
        chunks = self.known[places]
        if self.lazy and bool((chunks == UNKNOWN).any()):
            chunks = self.decode(places, 0, chunks.shape[-1])
        return chunks

    def decode(self, places: tuple[Tensor, ...], first: int, last: int) -> Tensor:
        """Compute tokens `first` to before `last` of some candidates (rows, numbers): (n, last - first)."""
        raise AssertionError("these candidates are known")


class SamplingStats(NamedTuple):
    """What sampling cost, per row (B,)."""

    draws: Tensor  # candidates that were used
    fallbacks: Tensor  # how often the exponent was lowered by one
    unsettled: Tensor  # true if a limit of draws was reached first


def inverse(temperature: float) -> float:
    """1/T of a temperature in (0, 1]."""
    if not isinstance(temperature, int | float) or not MIN_TEMPERATURE <= temperature <= 1:
        small = isinstance(temperature, int | float) and 0 <= temperature < MIN_TEMPERATURE
        remedy = "; use a small one, such as 0.1, for near-greedy decoding" if small else ""
        raise ConfigError(f"temperature must be above 0 and at most 1, not {temperature}{remedy}")
    s = 1 / temperature
    return float(round(s)) if abs(s - round(s)) <= INTEGER_TOLERANCE else s


def sample_from_candidates(
    candidates: Tensor | Candidates, inverse_temperature: float | Tensor, *, generator: NoiseSource = None
) -> tuple[Tensor, SamplingStats]:
    """Algorithm 2: select one of the candidates of each row.

    If no chunk occurs n times, n is lowered until one does; at n = 1 all candidates are equally likely.

    Args:
        candidates: ids (B, N, K), or `Candidates`.
        inverse_temperature: n = 1/T, at least 1, for all rows or for each (B,).

    Returns:
        Chunks (B, K), and statistics.

    Example:
        >>> chunks, stats = sample_from_candidates(model.sample(200), 2.0)  # T = 0.5
    """
    pool = _pool(candidates)
    target = _exponents(pool, inverse_temperature)
    count, exponent = _counts_of_lazy(pool, target) if pool.lazy else _counts_of_known(pool, target)
    uniform = draw_uniform(generator, pool.known[:, 0], 1, 1)[0]  # (B, 1)
    chunks = pool.chunks(pick(_weights(count, exponent), uniform)[:, 0])
    fallbacks = (target - exponent).ceil().long()
    return chunks, SamplingStats(pool.valid.sum(1), fallbacks, torch.zeros_like(fallbacks, dtype=torch.bool))


def _counts_of_known(pool: Candidates, target: Tensor) -> tuple[Tensor, Tensor]:
    """How often each candidate's chunk occurs (B, N), and the exponent, lowered if no chunk is that frequent (B,)."""
    everything = torch.ones_like(target, dtype=torch.bool)
    count, _ = chunk_counts(pool, everything, torch.zeros_like(target))
    return count, target.minimum(count.amax(1))


def _counts_of_lazy(pool: Candidates, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same; chunks that are too rare to be selected are not decoded, and have a count of 0."""
    counts = pool.valid.double()  # at an exponent of 1 all candidates are equally likely
    exponent, searching = target.clone(), target > 1
    while bool(searching.any()):
        count, most = chunk_counts(pool, searching, exponent)
        found = searching & (count > 0).any(1)
        counts = torch.where(found[:, None], count, counts)
        exponent = torch.where(searching & ~found, most.double(), exponent)  # no count in between occurs
        searching = searching & ~found & (exponent > 1)
    return counts, exponent


def sample_token_by_token(
    candidates: Tensor | Candidates,
    inverse_temperature: float | Tensor,
    *,
    generator: NoiseSource = None,
    refill: int = 0,
    fewest: int | Tensor = 0,
) -> tuple[Tensor, SamplingStats]:
    """Select a token by its frequency among the candidates, then the next among those that start with it.

    As N grows this samples the product of P(x_k | x_<k)^(1/T), normalized at each k.

    Args:
        candidates: ids (B, N, K), or `Candidates`.
        inverse_temperature: 1/T, at least 1, for all rows or for each (B,).
        refill, fewest: a row with fewer than `fewest` candidates left draws `refill` more, a few times; those that
            start with the chosen tokens are added.

    Returns:
        Chunks (B, K), and statistics.

    Example:
        >>> chunks, stats = sample_token_by_token(model.sample(200), 2.0)  # T = 0.5
    """
    pool = _pool(candidates)
    target = _exponents(pool, inverse_temperature)
    size = pool.known.shape[-1]
    uniform = draw_uniform(generator, pool.known[:, 0], 1, size)[0]  # (B, K)
    live, chosen = pool.valid.clone(), []
    fallbacks, unsettled = torch.zeros_like(target), torch.zeros_like(target, dtype=torch.bool)
    for k in range(size):
        for _ in range(MAX_REFILLS if k and refill else 0):
            if not bool((few := live.sum(1) < fewest).any()):
                break
            pool.grow(refill, few)
            live = _agreeing(pool, live, chosen)
        unsettled |= live.sum(1) < fewest
        if pool.lazy and not refill and bool((live.sum(1) == 1).all()):  # nothing is left to choose
            chosen += pool.chunks(live.long().argmax(1))[:, k:].unbind(1)
            fallbacks += (size - k) * (target - 1).ceil()
            break
        count = _regroup(torch.zeros_like(live, dtype=torch.long), pool.tokens(k, live), live)[1].double()
        exponent = target.minimum(count.amax(1))
        fallbacks += (target - exponent).ceil()
        place = pick(_weights(count, exponent), uniform[:, k : k + 1])  # (B, 1)
        chosen.append(pool.known[..., k].gather(1, place)[:, 0])
        live = live & (pool.known[..., k] == chosen[-1][:, None])
    return torch.stack(chosen, dim=-1), SamplingStats(pool.valid.sum(1), fallbacks.long(), unsettled)


def _agreeing(pool: Candidates, live: Tensor, chosen: list[Tensor]) -> Tensor:
    """Candidates that were live, and new ones that start with the chosen tokens: a mask (B, N)."""
    new = pool.valid.clone()
    new[:, : live.shape[1]] = False
    for k, token in enumerate(chosen):
        new &= pool.tokens(k, new) == token[:, None]
    new[:, : live.shape[1]] = live
    return new


def grow_until_settled(
    pool: Candidates, inverse_temperature: float | Tensor, num_candidates: int, tolerance: float, block: int
) -> Tensor:
    """Draw candidates in blocks, up to `num_candidates`, until more would hardly change the result of Algorithm 2.

    A row is settled if its distribution over chunks is expected to be within `tolerance` (total variation) of the one
    that infinitely many candidates would give. Returns which rows (B,) were never settled.
    """
    unsettled, exponent = pool.valid.any(1), _exponents(pool, inverse_temperature)
    while True:
        count, _ = chunk_counts(pool, unsettled, exponent)
        unsettled = unsettled & ~(expected_error(pool, count, exponent) <= tolerance)
        room = num_candidates - int(pool.valid[unsettled].sum(1).max()) if bool(unsettled.any()) else 0
        if room <= 0:
            return unsettled
        pool.grow(min(block, room), unsettled)


def expected_error(pool: Candidates, count: Tensor, exponent: Tensor) -> Tensor:
    """Expected total variation between Algorithm 2's distribution and its limit (B,); infinite if no chunk is left.

    A frequency p among M draws has variance p(1-p)/M, and a chunk's weight is its frequency to the power 1/T: to first
    order that gives every probability a standard deviation. One unseen chunk counts as seen once, so that agreement in
    a first small block is not taken for certainty.
    """
    drawn = pool.valid.sum(1, keepdim=True).double()  # (B, 1)
    live = count > 0
    weights = _weights(count, exponent)  # per candidate, so c times per chunk
    w = torch.where(live, weights * count, 0)  # per chunk
    each = torch.where(live, 1 / count.clamp(min=1), 0)  # turns sums over candidates into sums over chunks
    total = (w * each).sum(1, keepdim=True)
    w = w / total.clamp(min=torch.finfo(torch.double).tiny)
    p = count / (drawn + 1)
    spread = (w.square() / p.clamp(min=1e-300) * each).sum(1, keepdim=True) + 1 / (drawn + 1)
    variance = torch.where(live, (1 - 2 * w) / p.clamp(min=1e-300), 0) + spread
    scale = exponent * (2 / math.pi / drawn[:, 0]).sqrt()  # 2/pi: from the standard deviation to the mean distance
    error = 0.5 * scale * (w * variance.clamp(min=0).sqrt() * each).sum(1)
    return torch.where(live.any(1), error, torch.inf)


def chunk_counts(pool: Candidates, rows: Tensor, fewest: Tensor) -> tuple[Tensor, Tensor]:
    """How often each candidate's chunk occurs in its row, 0 if that is less than `fewest` (B,): (B, N).

    Also returns the largest count that is still possible for a row without any such chunk (B,). A chunk is at most as
    frequent as its prefix, so rare candidates are dropped token by token, before they are decoded.
    """
    live = pool.valid & rows[:, None]
    group = number = torch.zeros_like(live, dtype=torch.long)
    most = torch.zeros_like(rows, dtype=torch.long)
    for k in range(pool.known.shape[-1]):
        group, number = _regroup(group, pool.tokens(k, live), live)
        rare = live & (number < fewest[:, None])
        most = most.maximum(torch.where(rare, number, 0).amax(1))
        live = live & ~rare
    return torch.where(live, number, 0).double(), most


def _regroup(groups: Tensor, tokens: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Split the groups (B, N) of live candidates by token; returns the new groups and their sizes, 0 where not live."""
    keys = torch.where(live, (groups << 32) + tokens, torch.iinfo(torch.long).max)
    ordered, order = keys.sort(1)
    index = F.pad((ordered[:, 1:] != ordered[:, :-1]).cumsum(1), (1, 0))  # of the group, in that order
    sizes = torch.zeros_like(keys).scatter_add_(1, index, torch.ones_like(keys))
    split = torch.empty_like(keys).scatter_(1, order, index)
    return split, torch.where(live, sizes.gather(1, split), 0)


def _weights(count: Tensor, exponent: Tensor) -> Tensor:
    """Weight of each candidate (B, N): all c copies of a chunk together weigh C(c, exponent); 0 if c is smaller."""
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


def _exponents(pool: Candidates, inverse_temperature: float | Tensor) -> Tensor:
    """1/T of each row: (B,)."""
    rows, device = len(pool.known), pool.known.device
    if isinstance(inverse_temperature, Tensor):
        return inverse_temperature.to(device, torch.double).expand(rows)
    if not 1 <= inverse_temperature < math.inf:
        raise ConfigError(f"1/T must be at least 1 and finite, not {inverse_temperature}")
    return torch.full((rows,), inverse_temperature, dtype=torch.double, device=device)
