"""The likelihood of a mixture of latents against its definition, enumerated."""

import itertools
import math

import pytest
import torch

from calm.scores.likelihood import mixture_cross_entropy

N, K, V = 3, 2, 4
LOG_PROBS = (torch.randn(N, K, V, generator=torch.Generator().manual_seed(0)).double() * 2).log_softmax(-1)


def test_cross_entropy_is_that_of_the_mixture_and_of_its_conditionals():
    p = LOG_PROBS.exp()
    joint = torch.stack([p[i, 0][:, None] * p[i, 1] for i in range(N)]).mean(0)  # (V, V)
    for x, y in itertools.product(range(V), repeat=2):
        losses = mixture_cross_entropy(torch.stack([-LOG_PROBS[:, 0, x], -LOG_PROBS[:, 1, y]], dim=-1))  # (N, K)
        assert losses.shape == (K,)
        assert losses[0].item() == pytest.approx(-math.log(joint[x].sum()))
        assert losses[1].item() == pytest.approx(-math.log(joint[x, y] / joint[x].sum()))
        assert losses.sum().item() == pytest.approx(-math.log(joint[x, y]))


def test_one_latent_and_leading_dimensions():
    losses = torch.rand(1, 2, 5, K, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mixture_cross_entropy(losses), losses[0].double())
    torch.testing.assert_close(mixture_cross_entropy(losses.expand(7, -1, -1, -1)), losses[0].double())


def test_bound_tightens_with_the_number_of_latents():
    """Latents drawn from a known distribution: the mean bound falls towards the true cross-entropy and stays above."""
    generator = torch.Generator().manual_seed(2)
    given = torch.tensor([0.9, 0.1, 0.01, 0.3]).double()  # p(x | z) for four equally likely z
    truth = -math.log(given.mean())
    means = []
    for number in (1, 4, 64):
        drawn = given[torch.randint(4, (number, 20_000, 1), generator=generator)]
        means.append(float(mixture_cross_entropy(-drawn.log()).mean()))
    assert means[0] > means[1] > means[2] > truth
    assert means[2] == pytest.approx(truth, abs=0.02)
