"""Brier estimates have the exact score as their expectation: all outcomes of small cases are enumerated."""

import itertools

import pytest
import torch

from calm.scores import accuracy_and_collision, brier, brier_lm, brier_of_samples

BIGRAMS = torch.tensor(list(itertools.product(range(2), repeat=2)))  # all outcomes of two binary tokens
PROBABILITIES = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def exact(target: torch.Tensor) -> torch.Tensor:
    """2·P(y) - Σ P(x)² for the first token and for both."""
    first = torch.stack([PROBABILITIES[:2].sum(), PROBABILITIES[2:].sum()])
    one = 2 * first[target[0]] - (first**2).sum()
    both = 2 * PROBABILITIES[2 * target[0] + target[1]] - (PROBABILITIES**2).sum()
    return torch.stack([one, both])


@pytest.mark.parametrize("count", [2, 3, 4])
def test_unbiased_for_any_number_of_samples(count):
    for target in BIGRAMS:
        expected = torch.zeros(2, dtype=torch.float64)
        for drawn in itertools.product(range(4), repeat=count):
            weight = PROBABILITIES[list(drawn)].prod()
            expected += weight * brier_of_samples(BIGRAMS[list(drawn)], target).double()
        torch.testing.assert_close(expected, exact(target), rtol=1e-6, atol=1e-6)


def test_two_samples_give_the_estimator_of_the_paper():
    a, b, y = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 4]]), torch.tensor([[1, 5, 3]])
    assert brier(a, b, y).tolist() == [[1.0, -1.0, 0.0]]
    assert brier(a, a, a).tolist() == [[1.0, 1.0, 1.0]]


def test_more_samples_have_less_variance():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(PROBABILITIES, 8 * 4000, replacement=True, generator=generator).view(8, 4000)
    target = torch.tensor([1, 1]).expand(4000, 2)
    two, eight = (brier_of_samples(BIGRAMS[drawn[:n]], target) for n in (2, 8))
    assert (eight.var(0) < two.var(0) / 2).all()


def test_accuracy_and_collision():
    samples = torch.tensor([[[0, 0]], [[0, 1]], [[0, 0]]])
    accuracy, collision = accuracy_and_collision(samples, torch.tensor([[0, 0]]))
    torch.testing.assert_close(accuracy, torch.tensor([[1.0, 2 / 3]]))
    torch.testing.assert_close(collision, torch.tensor([[1.0, 1 / 3]]))


def test_brier_lm():
    assert brier_lm(torch.tensor([0.4, 0.2, 0.1, 0.05])) == pytest.approx(100 * (0.4 * 0.2 * 0.1 * 0.05) ** 0.25)
    assert brier_lm(torch.tensor([0.4, 0.2, 0.1, 0.0])) is None
    assert brier_lm(torch.tensor([0.4, 0.2, -0.1, -0.1])) is None  # the product of two negative scores does not count
    with pytest.raises(ValueError, match="Brier-1 to Brier-4, not 3"):
        brier_lm(torch.ones(3))
    with pytest.raises(ValueError, match="at least 2 samples"):
        brier_of_samples(torch.zeros(1, 3), torch.zeros(3))
