"""The mixture against its definition, enumerated."""

import itertools
import math

import pytest
import torch

from calm.errors import ConfigError
from calm.sampling.mixture import Cut, Mixture, mixture_nats, sample_mixture

N, K, V = 3, 2, 4
LOGS = (torch.randn(N, K, V, generator=torch.Generator().manual_seed(0)).double() * 2).log_softmax(-1)


def joint() -> torch.Tensor:
    """P(x) by its definition, (V, V)."""
    p = LOGS.exp()
    return torch.stack([p[i, 0][:, None] * p[i, 1] for i in range(N)]).mean(0)


def rows(times: int):
    return lambda chosen: LOGS[:, len(chosen)].expand(times, N, V)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_samples_are_those_of_the_mean_tempered_token_by_token(temperature):
    times = 40_000
    uniform = torch.rand(times, K, generator=torch.Generator().manual_seed(1))
    chunks, logs = sample_mixture(rows(times), K, Cut(temperature), uniform)
    p = joint()
    first = p.sum(1) ** (1 / temperature)
    second = (p / p.sum(1, keepdim=True)) ** (1 / temperature)
    expected = (first / first.sum())[:, None] * second / second.sum(1, keepdim=True)
    found = torch.bincount(chunks[:, 0] * V + chunks[:, 1], minlength=V * V).view(V, V) / times
    error = (expected * (1 - expected) / times).sqrt()
    assert bool(((found - expected).abs() <= 4.5 * error + 1e-6).all())
    assert torch.allclose(logs.sum(1).double(), p[chunks[:, 0], chunks[:, 1]].log(), atol=1e-5)


def test_cuts():
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).double()
    kept = {
        Cut(top_k=2): [4 / 7, 3 / 7, 0, 0],
        Cut(top_p=0.7): [4 / 7, 3 / 7, 0, 0],
        Cut(top_p=0.71): [4 / 9, 3 / 9, 2 / 9, 0],
        Cut(top_p=1e-9): [1, 0, 0, 0],
        Cut(min_p=0.5): [4 / 9, 3 / 9, 2 / 9, 0],
        Cut(temperature=0.5): [16 / 30, 9 / 30, 4 / 30, 1 / 30],
        Cut(temperature=0.5, top_p=0.8, top_k=3): [16 / 25, 9 / 25, 0, 0],
    }
    for cut, expected in kept.items():
        assert cut.probabilities(p.log())[0].tolist() == pytest.approx(expected), cut


@pytest.mark.parametrize(
    "bad", [{"temperature": 0}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -1}]
)
def test_cuts_that_make_no_sense(bad):
    with pytest.raises(ConfigError, match="must be"):
        Cut(**bad)


def test_nats_are_those_of_the_mixture_and_of_its_conditionals():
    p = joint()
    for x, y in itertools.product(range(V), repeat=2):
        each = torch.stack([-LOGS[:, 0, x], -LOGS[:, 1, y]], dim=-1)  # (N, K)
        nats = mixture_nats(each)
        assert float(nats[0]) == pytest.approx(-math.log(p[x].sum()))
        assert float(nats.sum()) == pytest.approx(-math.log(p[x, y]))
        mixture = Mixture(rows(1))
        assert float(mixture.next()[0, x]) == pytest.approx(-float(nats[0]), abs=1e-5)
        mixture.take(torch.tensor([x]))
        assert float(mixture.next()[0, y]) == pytest.approx(-float(nats[1]), abs=1e-5)


def test_the_bound_tightens_with_the_number_of_latents():
    """Latents drawn from a known distribution: the mean bound falls towards the true nats and stays above."""
    generator = torch.Generator().manual_seed(2)
    given = torch.tensor([0.9, 0.1, 0.01, 0.3]).double()  # p(x | z) for four equally likely z
    truth = -math.log(given.mean())
    means = []
    for number in (1, 4, 64):
        drawn = given[torch.randint(4, (number, 20_000, 1), generator=generator)]
        means.append(float(mixture_nats(-drawn.log()).mean()))
    assert means[0] > means[1] > means[2] > truth
    assert means[2] == pytest.approx(truth, abs=0.02)
