"""Nats of tokens by their definition, and sums over some words against sums over all."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from calm.scores.tokens import token_nats
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


def test_some_words_stand_for_the_rest():
    vocab_size = 400
    states, vocabulary = drawn(1, K, D), drawn(vocab_size, D, seed=1)
    tokens = np.array([[3, 7, 399]])
    targets = torch.from_numpy(tokens)
    whole = sampled_words(tokens, 10_000, vocab_size, 0, 0)
    assert torch.equal(whole.ids, torch.arange(vocab_size))
    assert (whole.weights == 1).all()
    torch.testing.assert_close(token_nats(states, vocabulary, targets, whole), token_nats(states, vocabulary, targets))
    normaliser = (states @ vocabulary.T).exp().sum(-1)
    estimates = []
    for step in range(400):
        some = sampled_words(tokens, 50, vocab_size, 0, step)
        assert len(some.ids) == 53
        assert {3, 7, 399} <= set(some.ids.tolist())
        assert some.weights.sum().item() == pytest.approx(vocab_size)
        estimates.append(((states @ vocabulary[some.ids].T).exp() * some.weights).sum(-1))
    found = torch.stack(estimates)
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - normaliser).abs() < 4 * error).all()  # unbiased: a normaliser in each of 400 samples
