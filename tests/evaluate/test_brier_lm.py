"""BrierLM with error bars: per-document sums, bootstrap intervals, paired comparisons, and undefined scores."""

import numpy as np
import pytest
import torch

from calm.errors import ConfigError, DataError
from calm.evaluate.brier_lm import BrierLM, Score
from calm.evaluate.documents import Document, windows_of
from calm.evaluate.evaluation import evaluate_documents, evaluate_sampler


def filled(accuracy, collision, documents=50, positions=20, seed=0) -> BrierLM:
    """Bernoulli draws around given means, the same number in every document."""
    generator = torch.Generator().manual_seed(seed)
    found = BrierLM()
    for number in range(documents):
        draws = [torch.rand(positions, 4, generator=generator) < torch.tensor(mean) for mean in (accuracy, collision)]
        found.add(torch.full((positions,), number), *(draw.float() for draw in draws))
    return found


MEANS = [0.5, 0.3, 0.2, 0.1], [0.4, 0.2, 0.1, 0.05]


def test_scores_do_not_depend_on_the_order_of_adding():
    whole = filled(*MEANS)
    parts = [BrierLM(), BrierLM()]
    for number, total in whole.sums.items():
        parts[number % 2].sums[number] = total
    merged = BrierLM().merge(parts)
    assert merged.compute() == whole.compute()
    scores = whole.compute()
    assert scores["positions"] == 1000
    assert scores["documents"] == 50
    values = [scores[f"brier_{n}"].value for n in range(1, 5)]
    assert values == pytest.approx([2 * 100 * a - 100 * c for a, c in zip(*MEANS, strict=True)], abs=10)
    assert scores["brier_lm"].value == pytest.approx(np.prod(values) ** 0.25)
    accuracies = [scores[f"accuracy_{n}"].value for n in range(1, 5)]
    assert scores["accuracy"].value == pytest.approx(np.prod(accuracies) ** 0.25)


def test_standard_errors_and_intervals_match_repeated_experiments():
    repeated = [filled(*MEANS, seed=seed).compute(resamples=300) for seed in range(60)]
    for name in ("brier_1", "brier_lm", "collision_2"):
        values = np.array([scores[name].value for scores in repeated])
        errors = np.array([scores[name].standard_error for scores in repeated])
        assert errors.mean() == pytest.approx(
            values.std(), rel=0.3
        )  # 60 repeats: their standard deviation is known to 9%
    truth = 200 * 0.5 - 100 * 0.4
    covered = [scores["brier_1"].low < truth < scores["brier_1"].high for scores in repeated]
    assert np.mean(covered) > 0.85


def test_paired_comparison_has_a_smaller_error():
    one, other = filled(*MEANS, seed=1), filled(*MEANS, seed=1)
    for total in other.sums.values():
        total[1] += 0.4  # slightly more accurate in every document
    difference = other.compare(one)["brier_1"]
    assert difference.value == pytest.approx(2 * 100 * 0.4 / 20)
    assert difference.standard_error < 1e-9
    assert one.compute()["brier_1"].standard_error > 1
    with pytest.raises(DataError, match="the same positions"):
        one.compare(filled(*MEANS, documents=49))
    other.sums[0][0] += 1  # the same total number of positions, distributed differently
    other.sums[1][0] -= 1
    with pytest.raises(DataError, match="the same positions"):
        one.compare(other)


def test_undefined_scores_are_none():
    scores = filled([0.1, 0.01, 0.0, 0.0], [0.3, 0.1, 0.05, 0.01]).compute()
    assert scores["brier_lm"] == Score(None, None, None, None)
    assert scores["brier_2"].value < 0
    with pytest.raises(DataError, match="no position was scored"):
        BrierLM().compute()


def test_undefined_bootstrap_samples_are_not_zeros():
    """Only one document ever predicts four tokens correctly: in many resamples Brier-4 is negative."""
    found = filled([0.9, 0.9, 0.9, 0.0], [0.1, 0.1, 0.1, 0.02], documents=4, seed=2)
    found.sums[0][4] = 1.2  # all of the accuracy of four tokens is in one document
    score = found.compute()["brier_lm"]
    assert score.value > 0
    assert score.low is None
    assert score.high > score.value


def test_one_document_has_no_error_bars():
    found = filled(*MEANS, documents=1)
    score = found.compute()["brier_1"]
    assert score.value is not None
    assert (score.standard_error, score.low, score.high) == (None, None, None)
    assert "only one document" in found.warnings()[0]


def test_deterministic_sampler_gives_a_warning():
    documents = [list(range(20))] * 3
    found = evaluate_sampler(lambda prefixes, n: torch.ones(len(prefixes), n, 4, dtype=torch.long), documents)
    assert "has no distribution to score" in found.warnings()[0]
    assert not filled(*MEANS).warnings()


def test_evaluate_sampler_of_a_fair_coin():
    """A fair coin at every token: P(y) = Σ P(x)² = 2^-n, so Brier-n = 2^-n."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(2, (400,), generator=generator).tolist() for _ in range(40)]

    def draw(prefixes, count):
        assert all(len(prefix) % 4 == 0 and prefix for prefix in prefixes)
        return torch.randint(2, (len(prefixes), count, 4), generator=generator)

    scores = evaluate_sampler(draw, documents, num_samples=4).compute()
    assert scores["positions"] == 40 * 99
    for n in range(1, 5):
        score = scores[f"brier_{n}"]
        assert abs(score.value - 100 * 0.5**n) < 4 * score.standard_error
    with pytest.raises(ConfigError, match="at least 2 to measure collisions, not 1"):
        evaluate_sampler(draw, documents, num_samples=1)
    with pytest.raises(DataError, match=r"integers of shape \(64, 2, 4\), not torch.int64 of \(3,\)"):
        evaluate_sampler(lambda *_: [1, 2, 3], documents)
    with pytest.raises(DataError, match=r"not torch.float32"):
        evaluate_sampler(lambda prefixes, n: torch.full((len(prefixes), n, 4), torch.nan), documents)
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        evaluate_sampler(draw, documents, stride=0)
    tensors = evaluate_sampler(lambda prefixes, n: torch.zeros(len(prefixes), n, 4).long(), torch.zeros(3, 9).long())
    assert tensors.compute()["accuracy_4"].value == 100


def test_every_start_is_in_exactly_one_window():
    for size in (3, 7, 8, 9, 20, 61, 64, 68, 69):
        tokens = np.arange(100, 100 + size)
        starts = []
        for window in windows_of([Document(0, tokens)], length=16):
            offset = int(window.tokens[0]) - 100
            starts += [offset + s for s in range(4, 17, 4) if s + 4 <= len(window.tokens)]
        assert starts == [s for s in range(4, size, 4) if s + 4 <= size]


class TokenEstimator:
    """Returns the token at each start as its accuracy."""

    length = 16

    def __init__(self, chunk_size):
        self.chunk_size = chunk_size

    def estimate(self, tokens, noise):
        starts = range(self.chunk_size, self.length + 1, self.chunk_size)
        values = torch.tensor([[[row[s]] * 4 for s in starts] for row in tokens.tolist()]).float()
        return values, torch.zeros_like(values), None


@pytest.mark.parametrize(("positions", "stride"), [("shared", 8), ("own", 2), ("every", 1)])
def test_positions(positions, stride):
    document = Document(3, np.arange(1000, 1050))
    estimator = TokenEstimator(2)
    found = evaluate_documents(estimator, [document], positions=positions, unit=8, pad_token_id=0)
    starts = list(range(stride, 50 - 3, stride))
    assert found.brier.positions == len(starts)
    total = found.brier.sums[3]
    assert total[1] == sum(1000 + s for s in starts)
    again = evaluate_documents(TokenEstimator(2), [document], positions=positions, unit=8, batch_size=1)
    ranks = [
        evaluate_documents(TokenEstimator(2), [document], positions=positions, unit=8, rank=r, world_size=3).brier
        for r in range(3)
    ]
    assert again.brier.compute() == found.brier.compute() == BrierLM().merge(ranks).compute()
