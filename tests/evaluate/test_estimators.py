"""Accuracy and collision of n-grams against brute force, for models whose probabilities are known."""

import itertools
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from calm.evaluate import estimators as module
from calm.evaluate.estimators import CalmEstimator, SoftmaxEstimator
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import CalmConfig
from calm.noise import RowNoise, draw_uniform

V, LENGTH = 2, 8
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def known_calm(chunk_size: int) -> tuple[CalmForCausalLM, torch.Tensor]:
    """A real backbone whose head draws token k of a chunk from softmax(W_k·hidden), independently of the others."""
    torch.manual_seed(0)
    inner = {"vocab_size": V, "chunk_size": chunk_size, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    model = CalmForCausalLM(CalmConfig({**SMALL, "initializer_range": 0.5}, inner)).eval()
    weights = 0.15 * torch.randn(chunk_size, V, 16)  # no outcome is so rare that it is never drawn

    def sample(hidden, num_samples, generator=None):
        uniform = draw_uniform(generator, hidden, num_samples, chunk_size)
        return torch.cat([hidden.expand(num_samples, *hidden.shape), uniform], dim=-1)

    def tokens(latents):
        hidden, uniform = latents[..., :16], latents[..., 16:]
        first = torch.einsum("kvh,...h->...kv", weights, hidden).softmax(-1)[..., 0]
        return (uniform >= first).long()

    model.head.sample, model.autoencoder.tokens = sample, tokens
    return model, weights


def exact(probability, text: list[int], start: int) -> tuple[list[float], list[float]]:
    """P(y) and Σ P(x)² of the n tokens from a start, n = 1 to 4; `probability(tokens before, token)`."""
    accuracy, collision = [], []
    for n in range(1, 5):
        total = 0.0
        for continuation in itertools.product(range(V), repeat=n):
            p = 1.0
            for place, token in enumerate(continuation):
                p *= probability(tuple(text[:start]) + continuation[:place], token, start)
            total += p * p
            if list(continuation) == text[start : start + n]:
                accuracy.append(p)
        collision.append(total)
    return accuracy, collision


def calm_probability(model, weights):
    size = model.config.chunk_size

    @cache
    def chunk_probabilities(before: tuple[int, ...]) -> torch.Tensor:
        hidden = model.hidden_states(torch.tensor([before]))[0, -1]
        return torch.einsum("kvh,h->kv", weights, hidden).softmax(-1)

    def probability(before, token, start):
        whole = len(before) // size * size  # a chunk's tokens depend on the chunks before it alone
        return chunk_probabilities(before[:whole])[len(before) - whole, token].item()

    return probability


def check(estimator, probability, tokens, rounds):
    """The mean over many seeds is the exact value, within four standard errors (160 comparisons)."""
    drawn = [estimator.estimate(tokens, RowNoise([2 * r, 2 * r + 1])) for r in range(rounds)]
    size = estimator.chunk_size
    for kind in (0, 1):
        found = torch.stack([pair[kind] for pair in drawn])
        mean, error = found.mean(0), found.std(0) / rounds**0.5
        for row in range(len(tokens)):
            for place, start in enumerate(range(size, LENGTH + 1, size)):
                expected = torch.tensor(exact(probability, tokens[row].tolist(), start)[kind])
                assert ((mean[row, place] - expected).abs() <= 4 * error[row, place] + 1e-6).all(), (kind, row, start)


@pytest.mark.parametrize(("chunk_size", "num_samples"), [(1, 2), (1, 3), (2, 2), (2, 4), (4, 2), (4, 5), (8, 2)])
def test_calm_is_unbiased(chunk_size, num_samples):
    model, weights = known_calm(chunk_size)
    tokens = torch.randint(V, (2, LENGTH + 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        check(CalmEstimator(model, LENGTH, num_samples), calm_probability(model, weights), tokens, rounds=400)


def softmax_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=V, initializer_range=0.5)).eval()


def softmax_probability(model):
    @cache
    def probabilities(before: tuple[int, ...]) -> torch.Tensor:
        return model(torch.tensor([before])).logits[0, -1].softmax(-1)

    return lambda before, token, start: probabilities(before)[token].item()


def test_softmax_is_exact_where_prefixes_can_be_enumerated_and_else_unbiased(monkeypatch):
    model = softmax_model()
    tokens = torch.randint(V, (2, LENGTH + 4), generator=torch.Generator().manual_seed(1))
    probability = softmax_probability(model)
    with torch.no_grad():
        accuracy, collision = SoftmaxEstimator(model, LENGTH, 2).estimate(tokens, RowNoise([0, 1]))
        for row, start in itertools.product(range(2), range(1, LENGTH + 1)):
            expected = exact(probability, tokens[row].tolist(), start)
            torch.testing.assert_close(accuracy[row, start - 1], torch.tensor(expected[0]), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(collision[row, start - 1], torch.tensor(expected[1]), rtol=1e-4, atol=1e-6)
        monkeypatch.setattr(module, "ENUMERABLE", 0)
        check(SoftmaxEstimator(model, LENGTH, 2), probability, tokens, rounds=400)


def test_the_noise_of_a_row_is_its_own():
    model, _ = known_calm(2)
    tokens = torch.randint(V, (3, LENGTH + 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = CalmEstimator(model, LENGTH, 2).estimate(tokens, RowNoise([5, 6, 7]))
        alone = CalmEstimator(model, LENGTH, 2).estimate(tokens[1:2], RowNoise([6]))
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one[1:2], other)
