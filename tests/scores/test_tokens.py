"""Scores of tokens against enumeration of all chunks, and sums over some words against sums over all."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from calm.scores.tokens import Words, prefix_brier, token_nats
from calm.train.stages import sampled_words

V, K, D = 5, 3, 4


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_nats_are_those_of_a_softmax():
    states, vocabulary = drawn(2, K, D), drawn(V, D, seed=1)
    targets = torch.tensor([[0, 3, 4], [2, 2, 1]])
    expected = -torch.log_softmax(states @ vocabulary.T, -1)
    for row, k in product(range(2), range(K)):
        found = token_nats(states, vocabulary, targets)[row, k].item()
        assert found == pytest.approx(expected[row, k, targets[row, k]].item(), rel=1e-5)


def test_brier_is_unbiased_against_enumeration():
    """Two latents have two roles: all ordered pairs of three possible ones give the score of their mixture."""
    possible, vocabulary = 2 * drawn(3, K, D), drawn(V, D, seed=1)  # three equally probable latents
    target = torch.tensor([0, 3, 4])
    rows = torch.softmax(possible @ vocabulary.T, -1)  # (3, K, V)
    expected = []
    for n in range(1, K + 1):
        chunks = torch.tensor(list(product(range(V), repeat=n)))
        mixture = rows[:, torch.arange(n), chunks].prod(-1).mean(0)  # P of each n-gram
        (true,) = rows[:, torch.arange(n), target[None, :n]].prod(-1).mean(0)
        expected.append((2 * true - (mixture**2).sum()).item())
    found = torch.stack(
        [prefix_brier(possible[[i, j]], vocabulary, target) for i, j in product(range(3), repeat=2)]
    ).mean(0)  # the expectation over two independent draws
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-6)
    four = torch.stack([prefix_brier(possible[list(i)], vocabulary, target) for i in product(range(3), repeat=4)])
    torch.testing.assert_close(four.mean(0), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_some_words_stand_for_the_rest():
    vocab_size = 400
    states, vocabulary = drawn(2, 1, K, D), drawn(vocab_size, D, seed=1)
    tokens = np.array([[3, 7, 399]])
    targets = torch.from_numpy(tokens)
    whole = sampled_words(tokens, 10_000, vocab_size, 0, 0)
    assert torch.equal(whole.ids, torch.arange(vocab_size))
    assert (whole.weights == 1).all()
    torch.testing.assert_close(
        token_nats(states[0], vocabulary, targets, whole), token_nats(states[0], vocabulary, targets)
    )
    exact = prefix_brier(states, vocabulary, targets)
    torch.testing.assert_close(prefix_brier(states, vocabulary, targets, whole), exact)
    normaliser = (states[0] @ vocabulary.T).exp().sum(-1)
    estimates = []
    for step in range(400):
        some = sampled_words(tokens, 50, vocab_size, 0, step)
        assert len(some.ids) == 53
        assert {3, 7, 399} <= set(some.ids.tolist())
        assert some.weights.sum().item() == pytest.approx(vocab_size)
        estimates.append(((states[0] @ vocabulary[some.ids].T).exp() * some.weights).sum(-1))
    found = torch.stack(estimates)
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - normaliser).abs() < 4 * error).all()  # unbiased: a normaliser in each of 400 samples


def test_gradients_flow_to_the_states_and_stay_finite_where_targets_are_improbable():
    states = (50 * drawn(4, 2, K, D)).requires_grad_()
    targets = torch.tensor([[0, 3, 4], [2, 2, 1]])
    words = Words(torch.arange(V), torch.ones(V))
    prefix_brier(states, drawn(V, D, seed=1), targets, words).sum().backward()
    assert states.grad is not None
    assert states.grad.isfinite().all()
