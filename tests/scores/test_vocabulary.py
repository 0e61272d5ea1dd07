"""Sliced operations over a vocabulary against torch's own cross-entropy, and sampled softmaxes against full ones."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from calm.autoencoder import VocabularyProjection
from calm.cpu.linear import FastProjection
from calm.scores import vocabulary
from calm.scores.vocabulary import (
    VocabularySubset,
    most_probable_tokens,
    sample_tokens,
    token_losses,
    vocabulary_cross_entropy,
)
from calm.train.stages import sampled_subset


def make_problem(tokens=37, size=8, vocab_size=29):
    """States, token vectors, targets, and weights, in fp64."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, size, generator=generator, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(vocab_size, size, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(vocab_size, (tokens,), generator=generator)
    weights = torch.rand(tokens, generator=generator)
    return states, matrix, targets, weights


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cross_entropies(states, matrix, targets, subset=None) -> torch.Tensor:
    """The cross-entropy of each token by itself: (n,)."""
    one = torch.ones(1)
    return torch.stack(
        [vocabulary_cross_entropy(s[None], matrix, t[None], one, subset) for s, t in zip(states, targets, strict=True)]
    )


@pytest.mark.parametrize("elements", [1, 100, 10_000])
def test_value_and_gradient(monkeypatch, elements):
    monkeypatch.setattr(vocabulary, "SLICE_ELEMENTS", elements)
    states, matrix, targets, weights = make_problem()
    loss = vocabulary_cross_entropy(states, matrix, targets, weights)
    gradients = torch.autograd.grad(3 * loss, (states, matrix))
    reference = (F.cross_entropy(states @ matrix.T, targets, reduction="none") * weights).sum()
    expected = torch.autograd.grad(3 * reference, (states, matrix))
    # Logits are converted to fp32 inside: that is the precision to expect.
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-5)
    for gradient, value in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [0, 1])
def test_gradient_of_one_input_only(frozen):
    """A frozen vocabulary, as of the chain head, gets no gradient, and the other input the same one."""
    inputs = list(make_problem())
    expected = torch.autograd.grad(vocabulary_cross_entropy(*inputs), inputs[1 - frozen])
    inputs[frozen] = inputs[frozen].detach()
    torch.testing.assert_close(torch.autograd.grad(vocabulary_cross_entropy(*inputs), inputs[1 - frozen]), expected)


def test_cross_entropy_of_each_token_is_that_of_a_softmax():
    states, matrix, targets = randn(6, 4), randn(5, 4, seed=1), torch.tensor([0, 3, 4, 2, 2, 1])
    expected = -torch.log_softmax(states @ matrix.T, -1)[torch.arange(6), targets]
    torch.testing.assert_close(cross_entropies(states, matrix, targets), expected, rtol=1e-5, atol=0)


def test_subset_without_importance_weights_is_a_softmax_over_fewer_tokens():
    states, matrix, targets, weights = make_problem()
    ids = torch.unique(torch.cat([targets, torch.tensor([0, 5])]))
    loss = vocabulary_cross_entropy(states, matrix, targets, weights, VocabularySubset(ids, torch.ones(len(ids))))
    (gradient,) = torch.autograd.grad(loss, matrix)
    logits = states @ matrix.T
    bias = torch.full((29,), -torch.inf).index_fill(0, ids, 0.0)
    reference = (F.cross_entropy(logits + bias, targets, reduction="none") * weights).sum()
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-5)
    assert loss <= vocabulary_cross_entropy(states, matrix, targets, weights)
    outside = [v for v in range(29) if v not in ids]
    assert gradient[outside].eq(0).all()


def test_importance_weights_and_their_gradient():
    """Each token of a subset counts in the normalizer as often as its weight says; the target's logit is unchanged."""
    states, matrix, targets, weights = make_problem()
    ids = torch.unique(torch.cat([targets, torch.tensor([0, 5])]))
    subset = VocabularySubset(ids, 1 + torch.arange(len(ids)) % 3)
    loss = vocabulary_cross_entropy(states, matrix, targets, weights, subset)
    logits = states @ matrix[ids].T
    chosen = (states * matrix[targets]).sum(-1)
    reference = (((logits.exp() * subset.weights).sum(-1).log() - chosen) * weights).sum()
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(value, (states, matrix)) for value in (loss, reference))
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_sampled_softmax_has_an_unbiased_normaliser():
    vocab_size, tokens = 400, np.array([[3, 7, 399]])
    states, matrix, targets = randn(3, 4), randn(vocab_size, 4, seed=1), torch.from_numpy(tokens[0])
    whole = sampled_subset(tokens, 10_000, vocab_size, 0, 0)
    assert torch.equal(whole.ids, torch.arange(vocab_size))
    assert (whole.weights == 1).all()
    full = cross_entropies(states, matrix, targets)
    torch.testing.assert_close(cross_entropies(states, matrix, targets, whole), full)
    normalizer = (states @ matrix.T).exp().sum(-1)
    estimates = []
    for step in range(400):
        subset = sampled_subset(tokens, 50, vocab_size, 0, step)
        assert len(subset.ids) == 53
        assert {3, 7, 399} <= set(subset.ids.tolist())
        assert subset.weights.sum().item() == pytest.approx(vocab_size)
        estimates.append(((states @ matrix[subset.ids].T).exp() * subset.weights).sum(-1))
    found = torch.stack(estimates)
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - normalizer).abs() < 4 * error).all()


def test_all_logits_are_never_materialised(monkeypatch):
    """No intermediate tensor has more elements than a slice, except those of the size of the inputs."""
    monkeypatch.setattr(vocabulary, "SLICE_ELEMENTS", 1000)
    largest = 0

    class RecordLargest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
            nonlocal largest
            result = function(*arguments, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    states, matrix, targets, weights = make_problem(tokens=500, vocab_size=200)
    with RecordLargest():
        vocabulary_cross_entropy(states, matrix, targets, weights).backward()
    assert largest <= max(1000, states.numel(), matrix.numel())
    assert largest < 500 * 200 / 10


def test_argmax_and_losses(monkeypatch):
    monkeypatch.setattr(vocabulary, "SLICE_ELEMENTS", 100)
    states, matrix, targets, _ = make_problem()
    ids, losses = token_losses(states, matrix, targets)
    logits = states @ matrix.T
    assert torch.equal(ids, logits.argmax(-1))
    assert torch.equal(most_probable_tokens(states, matrix), logits.argmax(-1))
    expected = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)


def test_sampled_tokens_follow_the_softmax(monkeypatch):
    monkeypatch.setattr(vocabulary, "SLICE_ELEMENTS", 10)
    states, matrix, count = randn(3, 4), randn(6, 4, seed=1), 40_000
    tokens = sample_tokens(states, matrix, torch.rand(3, count, generator=torch.Generator().manual_seed(2)))
    expected = (states @ matrix.T).softmax(-1)
    found = F.one_hot(tokens, 6).float().mean(1)
    error = (expected * (1 - expected) / count).sqrt()
    assert ((found - expected).abs() < 4.5 * error).all()


def test_bf16_autocast_is_close():
    states, matrix, targets, weights = (t.float() if t.is_floating_point() else t for t in make_problem())
    with torch.autocast("cpu", torch.bfloat16):
        rough = vocabulary_cross_entropy(states, matrix, targets, weights)
    exact = vocabulary_cross_entropy(states, matrix, targets, weights)
    assert abs(rough - exact) / exact < 0.02  # bf16 has eight bits


@pytest.mark.parametrize("count", [1, 2, 5, 64, 65])
@pytest.mark.parametrize("shape", [(50, 8), (2**16, 80)])  # fits into a cache, and does not
@pytest.mark.parametrize("projection", [VocabularyProjection, FastProjection])
@torch.no_grad()
def test_vocabulary_projection(count, shape, projection):
    generator = torch.Generator().manual_seed(count)
    states, matrix = torch.randn(count, shape[1], generator=generator), torch.randn(*shape, generator=generator)
    # sums of at most 80 products of normal numbers, in another order: a few units of 1e-7 times sqrt(80)
    torch.testing.assert_close(projection()(states, matrix), states @ matrix.T, rtol=1e-5, atol=1e-5)
