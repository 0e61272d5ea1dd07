"""Sampling at a temperature against known distributions, brute force, and the theorems of §5."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calm.errors import CalmWarning, ConfigError
from calm.generate.rejection import expected_draws, sample_at_temperature
from calm.generate.temperature import (
    UNKNOWN,
    Candidates,
    grow_until_settled,
    inverse,
    sample_from_candidates,
    sample_token_by_token,
)

NUM_SAMPLES = 3000  # from each of three distributions
TEMPERATURES = [0.15, 0.3, 0.5, 0.7, 0.9, 1.0]
pytestmark = pytest.mark.filterwarnings("ignore:exact sampling")


def tempered(p: torch.Tensor, s: float) -> torch.Tensor:
    return p.double() ** s / (p.double() ** s).sum()


def assert_chi_square(counts: torch.Tensor, p: torch.Tensor) -> None:
    """Fails a correct sampler once in a million runs; outcomes expected less than five times are pooled."""
    expected = p * counts.sum()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    assert counts[~keep].sum() == 0
    statistic = float(((counts - expected).square() / expected.clamp(min=1e-300))[keep].sum())
    degrees = max(int(keep.sum()) - 1, 1)
    # Wilson and Hilferty: the cube root of chi-square over its degrees is nearly normal
    normal = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert normal < 4.75, f"{statistic} at {degrees} degrees of freedom"


def black_box(p: torch.Tensor, generator: torch.Generator):
    return lambda n: torch.multinomial(p, n, replacement=True, generator=generator)[:, None]


def distributions(temperature: float) -> list[torch.Tensor]:
    """Random ones of up to fifty outcomes that need at most a thousand draws on average."""
    generator = torch.Generator().manual_seed(7)
    found = []
    while len(found) < 3:
        outcomes = int(torch.randint(2, 51, (), generator=generator))
        p = torch.softmax(torch.randn(outcomes, generator=generator, dtype=torch.double) * 2, 0)
        if expected_draws(p, temperature) <= 1000:
            found.append(p)
    return found


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_algorithm_1_is_exact_and_its_cost_is_that_of_theorem_2(temperature):
    for number, p in enumerate(distributions(temperature)):
        generator = torch.Generator().manual_seed(number)
        draw, expected = black_box(p, generator), expected_draws(p, temperature)
        outcomes, used = torch.zeros(len(p)), []
        for _ in range(NUM_SAMPLES):
            chunk, stats = sample_at_temperature(draw, temperature, generator=generator, block=math.ceil(expected / 2))
            outcomes[chunk] += 1
            used.append(float(stats.draws))
            assert not stats.unsettled
        assert_chi_square(outcomes, tempered(p, inverse(temperature)))
        drawn = torch.tensor(used)
        assert float(drawn.mean()) == pytest.approx(
            expected, abs=4.5 * float(drawn.std()) / math.sqrt(NUM_SAMPLES) + 1e-9
        )


def test_theorem_2_within_two_percent():
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.double)
    for temperature in (0.4, 0.7):
        generator = torch.Generator().manual_seed(1)
        expected, draw, times = expected_draws(p, temperature), black_box(p, generator), 20_000
        used = sum(
            int(sample_at_temperature(draw, temperature, generator=generator, block=math.ceil(expected))[1].draws)
            for _ in range(times)
        )
        assert used / times == pytest.approx(expected, rel=0.02)  # 2.8 standard errors of a geometric number


@given(st.integers(2, 40), st.floats(0.05, 0.999), st.integers(0, 1000))
def test_corollary_bounds_the_cost(outcomes, temperature, seed):
    p = torch.softmax(torch.randn(outcomes, generator=torch.Generator().manual_seed(seed)).double() * 2, 0)
    s = inverse(temperature)
    total = float((p**s).sum())
    bound = (1 + math.floor(s)) / total if temperature <= 0.5 else (1 + outcomes ** (2 - s)) / total
    assert expected_draws(p, temperature) <= bound * (1 + 1e-9)


def test_block_size_does_not_change_the_result():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.double)
    stream = torch.multinomial(p, 100_000, replacement=True, generator=torch.Generator().manual_seed(3))[:, None]

    def run(block):
        place = 0

        def draw(n):
            nonlocal place
            place += n
            return stream[place - n : place]

        return sample_at_temperature(draw, 1 / 3, block=block)

    for block in (3, 10, 64):
        chunk, stats = run(block)
        assert int(chunk) == int(run(1000)[0])
        assert stats == run(1000)[1]


def test_exceeding_max_draws_is_reported():
    generator = torch.Generator().manual_seed(0)
    p = torch.full((1000,), 1e-3)
    with pytest.warns(CalmWarning, match="stopped after 200 draws, so the chunk is approximate; allow more with max"):
        chunk, stats = sample_at_temperature(black_box(p, generator), 0.1, generator=generator, max_draws=200)
    assert chunk.shape == (1,)
    assert stats.unsettled[0]
    assert stats.fallbacks[0] > 0


def test_max_draws_is_respected_at_tiny_temperatures():
    requested = []

    def draw(n):
        requested.append(n)
        return torch.zeros(n, 1, dtype=torch.long)

    with pytest.warns(CalmWarning, match="is approximate"):
        _, stats = sample_at_temperature(draw, 1e-3, max_draws=300)
    assert sum(requested) == 300
    assert stats.draws[0] == 300
    assert stats.unsettled[0]


def test_exact_sampling_near_temperature_1_warns_about_its_cost():
    draw = black_box(torch.tensor([0.5, 0.5]), torch.Generator().manual_seed(0))
    with pytest.warns(CalmWarning, match="as many draws as there are chunks"):
        sample_at_temperature(draw, 0.8)


@pytest.mark.parametrize("temperature", [0, -1, 1.5, math.nan, math.inf, 1e-309, "0.5", None])
def test_invalid_temperatures(temperature):
    with pytest.raises(ConfigError, match=r"above 0 and at most 1, not"):
        inverse(temperature)


def test_inverse_temperatures_close_to_an_integer_are_rounded():
    assert inverse(1 / 3 + 1e-12) == 3
    assert inverse(0.1 * 3 / 0.9) == 3
    assert inverse(0.3) % 1 > 0.3


# Algorithm 2


def sampled_counts(candidates: list[int], s: float, num_samples: int) -> Counter:
    rows = torch.tensor(candidates).view(1, -1, 1).expand(num_samples, -1, -1).contiguous()
    chunks, _ = sample_from_candidates(rows, s, generator=torch.Generator().manual_seed(0))
    return Counter(chunks.flatten().tolist())


def test_example_of_the_paper():
    a, b = 0, 1
    found = sampled_counts([a, 2, a, 3, b, 4, a, 5, b, 6], 2, 20_000)
    assert set(found) == {a, b}
    assert found[a] / 20_000 == pytest.approx(0.75, abs=4.5 * math.sqrt(0.75 * 0.25 / 20_000))


def expectation(p: torch.Tensor, s: float, number: int) -> torch.Tensor:
    """Algorithm 2's distribution over outcomes, by enumerating all batches of `number` draws; n is lowered by one."""
    total = torch.zeros(len(p), dtype=torch.double)
    for batch in itertools.product(range(len(p)), repeat=number):
        count = torch.bincount(torch.tensor(batch), minlength=len(p)).double()
        m = s
        while not bool((count >= m).any()):
            m = math.ceil(m) - 1
        w = torch.tensor(
            [math.gamma(c + 1) / math.gamma(m + 1) / math.gamma(c - m + 1) if c >= m else 0.0 for c in count.tolist()]
        )
        total += math.prod(float(p[x]) for x in batch) * w / w.sum()
    return total


@pytest.mark.parametrize("s", [1, 2, 3, 1.7])
def test_algorithm_2_equals_the_brute_force_expectation(s):
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.double)
    times, number = 60_000, 5
    generator = torch.Generator().manual_seed(1)
    candidates = torch.multinomial(p, times * number, replacement=True, generator=generator).view(times, number, 1)
    chunks, stats = sample_from_candidates(candidates, s, generator=generator)
    assert_chi_square(torch.bincount(chunks[:, 0], minlength=3), expectation(p, s, number))
    most = torch.stack([(candidates[..., 0] == x).sum(1) for x in range(3)]).amax(0)
    assert torch.equal(stats.fallbacks, (s - most.clamp(max=s)).ceil().long())
    assert (stats.draws == number).all()


def test_algorithm_2_converges_to_the_target():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.double)
    target, distances = tempered(p, 2), []
    for number in (3, 30, 1000):
        generator = torch.Generator().manual_seed(2)
        draws = torch.multinomial(p, 20_000 * number, replacement=True, generator=generator).view(20_000, number, 1)
        chunks, _ = sample_from_candidates(draws, 2.0, generator=generator)
        found = torch.bincount(chunks[:, 0], minlength=4) / 20_000
        distances.append(0.5 * float((found - target).abs().sum()))
    assert distances[0] > 2 * distances[1] > 2 * distances[2]
    assert distances[2] < 0.01  # the noise of 20,000 choices alone is about 0.006


def test_algorithm_2_counts_whole_chunks():
    """Equal tokens at some positions do not make chunks equal."""
    rows = torch.tensor([[[1, 2], [1, 3], [2, 2], [4, 4], [4, 4]]]).expand(100, -1, -1)
    assert (sample_from_candidates(rows, 2.0)[0] == 4).all()


@pytest.mark.parametrize("s", [2.0, 4.0, 6.0, 10.0, 3.5])
def test_choices_and_fallbacks_equal_those_of_plain_counting(s):
    """Chunks of several tokens, where a frequent prefix may belong to rare chunks only."""
    pools = torch.randint(3, (400, 20, 2), generator=torch.Generator().manual_seed(3))
    pools[0] = torch.tensor([[0, i] for i in range(10)] + [[1, 5]] * 9 + [[2, 2]])
    chunks, stats = sample_from_candidates(pools, s, generator=torch.Generator().manual_seed(0))
    for pool, chunk, fallbacks in zip(pools.tolist(), chunks.tolist(), stats.fallbacks.tolist(), strict=True):
        count = Counter(map(tuple, pool))
        m = min(s, max(count.values()))
        assert count[tuple(chunk)] >= m
        assert fallbacks == math.ceil(s - m)


def test_one_candidate_falls_back_to_temperature_1():
    for method in (sample_from_candidates, sample_token_by_token):
        chunks, stats = method(torch.tensor([[[3, 4]]]), 4.0)
        assert chunks.tolist() == [[3, 4]]
        assert stats.fallbacks[0] >= 3


class LazyCandidates(Candidates):
    """Candidates that are decoded on demand, and count how many tokens are."""

    lazy = True

    def __init__(self, tokens: torch.Tensor):
        super().__init__(torch.full_like(tokens, UNKNOWN))
        self.hidden, self.decoded = tokens, 0

    def decode(self, places, first, last):
        self.decoded += len(places[0]) * (last - first)
        return self.hidden[*places][:, first:last]


@pytest.mark.parametrize("method", [sample_from_candidates, sample_token_by_token])
@pytest.mark.parametrize("s", [1.0, 2.0, 5.0, 2.5])
def test_lazy_decoding_gives_the_same_result_with_fewer_tokens(method, s):
    tokens = torch.randint(8, (40, 50, 4), generator=torch.Generator().manual_seed(5))
    lazy = LazyCandidates(tokens)
    chunks, stats = method(lazy, s, generator=torch.Generator().manual_seed(1))
    same, same_stats = method(tokens, s, generator=torch.Generator().manual_seed(1))
    assert torch.equal(chunks, same)
    assert all(torch.equal(a, b) for a, b in zip(stats, same_stats, strict=True))
    assert lazy.decoded < 0.7 * tokens.numel()


def test_low_temperatures_terminate_quickly_if_all_candidates_differ():
    tokens = torch.arange(2 * 100 * 3).view(2, 100, 3)
    _, stats = sample_from_candidates(tokens, 1e6)
    assert (stats.fallbacks == 1e6 - 1).all()


# Growing pools


def test_rows_grow_until_they_are_settled():
    """On average the final distribution is within the tolerance of the exact one."""
    number, block = 4000, 25
    for tolerance in (0.05, 0.1, 0.2):
        distances, used = [], []
        for seed in range(30):
            generator = torch.Generator().manual_seed(seed)
            p = torch.softmax(torch.randn(8, generator=generator, dtype=torch.double) * 1.5, 0)
            stream = torch.multinomial(p, number, replacement=True, generator=generator)[None, :, None]
            pool = Candidates(stream[:, :block])
            pool.draw = lambda n, pool=pool, stream=stream: stream[:, (at := pool.known.shape[1]) : at + n]
            unsettled = grow_until_settled(pool, 2.0, number, tolerance, block)
            used.append(int(pool.valid.sum()))
            assert not unsettled

            def outcome(ids):
                count = torch.bincount(ids.flatten(), minlength=8).double()
                return count * (count - 1) / (count * (count - 1)).sum()

            distances.append(0.5 * float((outcome(pool.known) - tempered(p, 2)).abs().sum()))
        assert sum(distances) / len(distances) <= tolerance
        assert sum(used) / len(used) < 0.9 * number


def test_only_unsettled_rows_grow():
    settled = torch.zeros(1, 20, 1, dtype=torch.long)
    doubtful = torch.arange(20).view(1, 20, 1) // 2
    pool = Candidates(torch.cat([settled, doubtful]), lambda n: torch.randint(9, (2, n, 1)))
    unsettled = grow_until_settled(pool, 2.0, 100, 0.05, 20)
    assert pool.valid.sum(1).tolist() == [20, 100]
    assert unsettled.tolist() == [False, True]


def test_zero_tolerance_draws_all_candidates():
    pool = Candidates(torch.zeros(1, 20, 1, dtype=torch.long), lambda n: torch.zeros(1, n, 1, dtype=torch.long))
    grow_until_settled(pool, 2.0, 90, 0.0, 20)
    assert pool.valid.sum() == 90


# Token by token

JOINT = torch.tensor([[0.30, 0.05, 0.05], [0.12, 0.12, 0.06], [0.02, 0.08, 0.20]], dtype=torch.double)  # P(x_1, x_2)


def tempered_per_token(joint: torch.Tensor, s: float) -> torch.Tensor:
    first = tempered(joint.sum(1), s)
    return first[:, None] * torch.stack([tempered(row, s) for row in joint])


def test_token_by_token_equals_the_brute_force_expectation():
    number, s, times = 4, 2.0, 60_000
    p, pairs = JOINT.flatten(), list(itertools.product(range(3), repeat=2))
    expected = torch.zeros(9, dtype=torch.double)

    def weighted(tokens):
        count = Counter(tokens)
        m = min(s, max(count.values()))
        w = {t: math.comb(c, int(m)) for t, c in count.items()}
        return {t: v / sum(w.values()) for t, v in w.items()}

    for batch in itertools.product(range(9), repeat=number):
        chance = math.prod(float(p[x]) for x in batch)
        for first, share in weighted([pairs[x][0] for x in batch]).items():
            for second, part in weighted([pairs[x][1] for x in batch if pairs[x][0] == first]).items():
                expected[first * 3 + second] += chance * share * part
    generator = torch.Generator().manual_seed(4)
    draws = torch.multinomial(p, times * number, replacement=True, generator=generator).view(times, number)
    chunks, _ = sample_token_by_token(torch.stack([draws // 3, draws % 3], -1), s, generator=generator)
    assert_chi_square(torch.bincount(chunks[:, 0] * 3 + chunks[:, 1], minlength=9), expected)


@pytest.mark.parametrize("s", [1.0, 2.0, 1.5, 4.0])
def test_token_by_token_converges_to_the_temperature_of_a_softmax_model(s):
    distances, times = [], 4000
    for number in (4, 64, 1000):
        generator = torch.Generator().manual_seed(6)
        draws = torch.multinomial(JOINT.flatten(), times * number, replacement=True, generator=generator)
        draws = draws.view(times, number)
        chunks, _ = sample_token_by_token(torch.stack([draws // 3, draws % 3], -1), s, generator=generator)
        found = torch.bincount(chunks[:, 0] * 3 + chunks[:, 1], minlength=9) / times
        distances.append(0.5 * float((found - tempered_per_token(JOINT, s).flatten()).abs().sum()))
    noise = 0.5 * float((tempered_per_token(JOINT, s).flatten() / times).sqrt().sum())
    assert distances[-1] < 1.5 * noise + 0.01
    if s > 1:
        assert distances[0] > 2 * distances[-1]


def test_pool_is_refilled_with_candidates_that_match_the_prefix():
    generator = torch.Generator().manual_seed(8)

    def draw(n, rows=3):
        found = torch.multinomial(JOINT.flatten(), rows * n, replacement=True, generator=generator).view(rows, n)
        return torch.stack([found // 3, found % 3], -1)

    pool = Candidates(draw(10), draw)
    pool.known[0, :, 0] = 0  # the first row has enough that match, whatever it samples
    _, stats = sample_token_by_token(pool, 2.0, generator=generator, refill=10, fewest=8)
    assert stats.draws[0] == 10
    assert (stats.draws[1:] > 10).all()


def test_refilling_reduces_the_distance_to_the_limit():
    times, s, distances = 3000, 2.0, []
    for refill in (0, 20):
        generator = torch.Generator().manual_seed(9)

        def draw(n, generator=generator):
            found = torch.multinomial(JOINT.flatten(), times * n, replacement=True, generator=generator).view(times, n)
            return torch.stack([found // 3, found % 3], -1)

        chunks, _ = sample_token_by_token(
            Candidates(draw(20), draw), s, generator=generator, refill=refill, fewest=20 if refill else 0
        )
        found = torch.bincount(chunks[:, 0] * 3 + chunks[:, 1], minlength=9) / times
        distances.append(0.5 * float((found - tempered_per_token(JOINT, s).flatten()).abs().sum()))
    assert distances[1] < distances[0]


@pytest.mark.parametrize("method", [sample_from_candidates, sample_token_by_token])
def test_invalid_candidates(method):
    with pytest.raises(ConfigError, match="N at least 1"):
        method(torch.zeros(2, 0, 4, dtype=torch.long), 2.0)
    with pytest.raises(ConfigError, match="1/T must be at least 1"):
        method(torch.zeros(2, 3, 4, dtype=torch.long), 0.5)
