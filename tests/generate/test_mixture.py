"""The mixture against its definition, by enumeration."""

import itertools
import math

import pytest
import torch

from calm.errors import ConfigError
from calm.generate.mixture import LogitsProcessor, Mixture, sample_mixture
from calm.scores.likelihood import mixture_cross_entropy

N, K, V = 3, 2, 4
LOG_PROBS = (torch.randn(N, K, V, generator=torch.Generator().manual_seed(0)).double() * 2).log_softmax(-1)


def joint_probabilities() -> torch.Tensor:
    """P(x) by its definition, (V, V)."""
    p = LOG_PROBS.exp()
    return torch.stack([p[i, 0][:, None] * p[i, 1] for i in range(N)]).mean(0)


def next_log_probs(prefix: torch.Tensor) -> torch.Tensor:
    """(B, k) → (N, B, V)"""
    return LOG_PROBS[:, None, prefix.shape[1]].expand(N, len(prefix), V)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_samples_follow_the_mixture_with_the_temperature_applied_per_token(temperature):
    batch_size = 40_000
    uniform = torch.rand(batch_size, K, generator=torch.Generator().manual_seed(1))
    chunks, log_probs = sample_mixture(next_log_probs, K, LogitsProcessor(temperature), uniform)
    p = joint_probabilities()
    first = p.sum(1) ** (1 / temperature)
    second = (p / p.sum(1, keepdim=True)) ** (1 / temperature)
    expected = (first / first.sum())[:, None] * second / second.sum(1, keepdim=True)
    found = torch.bincount(chunks[:, 0] * V + chunks[:, 1], minlength=V * V).view(V, V) / batch_size
    error = (expected * (1 - expected) / batch_size).sqrt()
    assert bool(((found - expected).abs() <= 4.5 * error + 1e-6).all())
    assert torch.allclose(log_probs.sum(1).double(), p[chunks[:, 0], chunks[:, 1]].log(), atol=1e-5)


def test_logits_processor():
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).double()
    cases = {
        LogitsProcessor(): [0.4, 0.3, 0.2, 0.1],
        LogitsProcessor(top_k=2): [4 / 7, 3 / 7, 0, 0],
        LogitsProcessor(top_p=0.7): [4 / 7, 3 / 7, 0, 0],
        LogitsProcessor(top_p=0.71): [4 / 9, 3 / 9, 2 / 9, 0],
        LogitsProcessor(top_p=1e-9): [1, 0, 0, 0],
        LogitsProcessor(min_p=0.5): [4 / 9, 3 / 9, 2 / 9, 0],
        LogitsProcessor(temperature=0.5): [16 / 30, 9 / 30, 4 / 30, 1 / 30],
        LogitsProcessor(temperature=0.5, top_p=0.8, top_k=3): [16 / 25, 9 / 25, 0, 0],
    }
    for processor, expected in cases.items():
        assert processor(p.log())[0].tolist() == pytest.approx(expected), processor


@pytest.mark.parametrize("temperature", [1e-9, 1e-310, 5e-324])
def test_tiny_temperatures_choose_the_most_probable_token(temperature):
    """1e-310 is too small for its reciprocal, and every logit but 0 divided by it is infinite."""
    p = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.0, 0.0, 0.0, 1.0]]).double()
    one = LogitsProcessor(temperature)
    for processor in (one, LogitsProcessor.concat([one, LogitsProcessor(temperature, top_k=3)])):
        assert processor(p.log()).tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize(
    "invalid",
    [{"temperature": 0}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -1}],
)
def test_invalid_logits_processors(invalid):
    with pytest.raises(ConfigError, match="must be"):
        LogitsProcessor(**invalid)


def test_cross_entropy_is_that_of_the_mixture_and_of_its_conditionals():
    p = joint_probabilities()
    for x, y in itertools.product(range(V), repeat=2):
        losses = torch.stack([-LOG_PROBS[:, 0, x], -LOG_PROBS[:, 1, y]], dim=-1)  # (N, K)
        nats = mixture_cross_entropy(losses)
        assert float(nats[0]) == pytest.approx(-math.log(p[x].sum()))
        assert float(nats.sum()) == pytest.approx(-math.log(p[x, y]))
        mixture = Mixture(next_log_probs, batch_size=1)
        assert float(mixture.next()[0, x]) == pytest.approx(-float(nats[0]), abs=1e-5)
        mixture.append(torch.tensor([x]))
        assert float(mixture.next()[0, y]) == pytest.approx(-float(nats[1]), abs=1e-5)
