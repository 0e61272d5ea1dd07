"""The sliced vocabulary loss against torch's own cross-entropy."""

import pytest
import torch
from torch.nn import functional as F

from calm.scores import vocabulary
from calm.scores.vocabulary import nearest_words, vocabulary_cross_entropy, word_products


def problem(tokens=37, size=8, words=29):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, size, generator=generator, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(words, size, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(words, (tokens,), generator=generator)
    weights = torch.rand(tokens, generator=generator)
    return states, matrix, targets, weights


@pytest.mark.parametrize("elements", [1, 100, 10_000])
def test_value_and_gradient(monkeypatch, elements):
    monkeypatch.setattr(vocabulary, "SLICE_ELEMENTS", elements)
    states, words, targets, weights = problem()
    ours = vocabulary_cross_entropy(states, words, targets, weights)
    found = torch.autograd.grad(3 * ours, (states, words))
    plain = (F.cross_entropy(states @ words.T, targets, reduction="none") * weights).sum()
    expected = torch.autograd.grad(3 * plain, (states, words))
    # Logits are turned to fp32 inside: that is the precision to expect.
    torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-5)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_candidates_are_a_softmax_over_some_words():
    states, words, targets, weights = problem()
    candidates = torch.unique(torch.cat([targets, torch.tensor([0, 5])]))
    ours = vocabulary_cross_entropy(states, words, targets, weights, candidates)
    (gradient,) = torch.autograd.grad(ours, words)
    logits = states @ words.T
    keep = torch.full((29,), -torch.inf).index_fill(0, candidates, 0.0)
    plain = (F.cross_entropy(logits + keep, targets, reduction="none") * weights).sum()
    torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-5)
    assert ours <= vocabulary_cross_entropy(states, words, targets, weights)
    outside = [v for v in range(29) if v not in candidates]
    assert gradient[outside].eq(0).all()


def test_the_full_matrix_is_never_held(monkeypatch):
    """No tensor made on the way has more elements than a slice, except those of the size of the inputs."""
    monkeypatch.setattr(vocabulary, "SLICE_ELEMENTS", 1000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
            nonlocal largest
            result = function(*arguments, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    states, words, targets, weights = problem(tokens=500, words=200)
    with Watch():
        vocabulary_cross_entropy(states, words, targets, weights).backward()
    assert largest <= max(1000, states.numel(), words.numel())
    assert largest < 500 * 200 / 10


def test_nearest_words(monkeypatch):
    monkeypatch.setattr(vocabulary, "SLICE_ELEMENTS", 100)
    states, words, targets, _ = problem()
    ids, nats = nearest_words(states, words, targets)
    assert torch.equal(ids, (states @ words.T).argmax(-1))
    torch.testing.assert_close(
        nats.double(), F.cross_entropy(states @ words.T, targets, reduction="none"), rtol=1e-5, atol=1e-5
    )


def test_bf16_autocast_is_close():
    states, words, targets, weights = (t.float() if t.is_floating_point() else t for t in problem())
    with torch.autocast("cpu", torch.bfloat16):
        rough = vocabulary_cross_entropy(states, words, targets, weights)
    exact = vocabulary_cross_entropy(states, words, targets, weights)
    assert abs(rough - exact) / exact < 0.02  # bf16 has eight bits


@pytest.mark.parametrize("states", [1, 2, 5, 64, 65])
@pytest.mark.parametrize("words", [(50, 8), (2**16, 80)])  # in a cache, and not
def test_products_with_words_are_products(states, words):
    generator = torch.Generator().manual_seed(states)
    g, w = torch.randn(states, words[1], generator=generator), torch.randn(*words, generator=generator)
    # sums of at most 80 products of normal numbers, in another order: a few units of 1e-7 times sqrt(80)
    torch.testing.assert_close(word_products(g, w), g @ w.T, rtol=1e-5, atol=1e-5)
