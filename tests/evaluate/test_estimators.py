"""Accuracy and collision of n-grams against brute force, for models whose probabilities are known."""

import itertools
import math
from functools import cache

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from calm.errors import UserError
from calm.evaluate import estimators as module
from calm.evaluate.branches import Branches
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

    def tokens(latents, search=None):
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
        accuracy, collision, nats = SoftmaxEstimator(model, LENGTH, 2).estimate(tokens, RowNoise([0, 1]))
        torch.testing.assert_close(nats, -accuracy[..., 0].log())
        for row, start in itertools.product(range(2), range(1, LENGTH + 1)):
            expected = exact(probability, tokens[row].tolist(), start)
            torch.testing.assert_close(accuracy[row, start - 1], torch.tensor(expected[0]), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(collision[row, start - 1], torch.tensor(expected[1]), rtol=1e-4, atol=1e-6)
        monkeypatch.setattr(module, "MOST_BRANCHES", 20)  # in slices it is the same
        sliced = SoftmaxEstimator(model, LENGTH, 2).estimate(tokens, RowNoise([0, 1]))
        torch.testing.assert_close(sliced.collision, collision)
        monkeypatch.setattr(module, "ENUMERABLE", 0)
        for num_samples in (2, 7):
            check(SoftmaxEstimator(model, LENGTH, num_samples), probability, tokens, rounds=400)


def expected_score(probability, other, prefix) -> torch.Tensor:
    """Brier-n of `other` where text follows `probability`, n = 1 to 4, by enumeration."""
    found = []
    for n in range(1, 5):
        total = 0.0
        for y in itertools.product(range(V), repeat=n):
            p, q = (
                math.prod(each((*prefix, *y[:k]), token, len(prefix)) for k, token in enumerate(y))
                for each in (probability, other)
            )
            total += 2 * p * q - q * q
        found.append(total)
    return torch.tensor(found)


def perturbed(kind, factor):
    """A model of known probabilities that is true, too sure of itself, or wrong: estimator and probability."""
    if kind == "softmax":
        model = softmax_model()
        model.lm_head.weight.data.mul_(factor)
        return SoftmaxEstimator(model, LENGTH, 2), softmax_probability(model)
    model, weights = known_calm(kind)
    weights.mul_(factor)
    return CalmEstimator(model, LENGTH, 2), calm_probability(model, weights)


@pytest.mark.parametrize("kind", [1, 2, 4, 8, "softmax"])
def test_a_perturbed_model_scores_less_and_the_estimate_follows(kind, monkeypatch):
    """Every text of 4 tokens stands in the batch, weighted by its true probability: only the samples are random."""
    torch.manual_seed(1)
    prefix = torch.randint(V, (LENGTH,)).tolist()
    texts = list(itertools.product(range(V), repeat=4))
    tokens = torch.tensor([[*prefix, *text] for text in texts])
    monkeypatch.setattr(module, "ENUMERABLE", 0)
    _, truth = perturbed(kind, 1.0)
    weights = torch.tensor([exact(truth, [*prefix, *text], LENGTH)[0][3] for text in texts])
    scores, rounds = [], 300
    with torch.no_grad():
        for factor in (1.0, 8.0, -4.0):  # the truth, too sure of itself, and the wrong way round
            estimator, probability = perturbed(kind, factor)
            exactly = expected_score(truth, probability, prefix)
            drawn = []
            for r in range(rounds):
                accuracy, collision, _ = estimator.estimate(tokens, RowNoise([100 * r + i for i in range(len(texts))]))
                drawn.append((weights[:, None] * (2 * accuracy - collision)[:, -1]).sum(0))
            mean, error = torch.stack(drawn).mean(0), torch.stack(drawn).std(0) / rounds**0.5
            unseen = 3 / (rounds * len(texts))  # what never happened has no error; its probability is at most this
            assert ((mean - exactly).abs() < 3.5 * error + unseen).all()
            scores.append((exactly, mean))
    for exactly, mean in scores[1:]:
        assert (exactly < scores[0][0]).all()
        clear = scores[0][0] - exactly > 0.03  # more than the samples blur
        assert clear.sum() >= 2
        assert (mean < scores[0][1])[clear].all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_branch_sees_its_own_past_alone(attention):
    """What branches find is what a model finds that reads each text from its beginning."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=30, initializer_range=0.5, attn_implementation=attention))
    model.eval()
    branches = Branches(lambda ids, **kwargs: model(input_ids=ids, use_cache=True, **kwargs).logits)
    tokens, rest = torch.randint(30, (2, 6)), torch.randint(30, (5, 3))
    parents = [torch.tensor([1, 4, 4, 6, 11]), torch.tensor([0, 2, 3, 3, 4]), torch.tensor([1, 4, 4, 4, 4])]
    texts = [[*tokens[node // 6, : node % 6 + 1].tolist()] for node in range(12)]
    with torch.no_grad():
        branches.read(tokens)
        branches.plant(0, 3)
        branches.grow(torch.tensor([1, 4]), rest[:2, 0])  # and forgotten
        branches.plant(0, 6)
        for step, nodes in enumerate(parents):
            texts = [[*texts[node], rest[number, step].item()] for number, node in enumerate(nodes.tolist())]
            states = branches.grow(nodes, rest[:, step])
            for text, state in zip(texts, states, strict=True):
                torch.testing.assert_close(state, model(torch.tensor([text])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_the_noise_of_a_row_is_its_own():
    model, _ = known_calm(2)
    tokens = torch.randint(V, (3, LENGTH + 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = CalmEstimator(model, LENGTH, 2).estimate(tokens, RowNoise([5, 6, 7]))
        alone = CalmEstimator(model, LENGTH, 2).estimate(tokens[1:2], RowNoise([6]))
    assert torch.equal(together.accuracy[1:2], alone.accuracy)
    assert torch.equal(together.collision[1:2], alone.collision)


def test_all_positions_are_used_and_no_more():
    """A window, its four tokens behind and all branches fit learnt positions exactly."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=30, n_embd=16, n_head=2, n_layer=1, n_positions=LENGTH + 4 - 1)
    model = GPT2LMHeadModel(config).eval()
    model.transformer.wte.weight.data.mul_(50)  # sure of itself: branches go on
    tokens = torch.randint(30, (2, LENGTH + 4))
    with torch.no_grad():
        estimator = SoftmaxEstimator(model, LENGTH, 64)
        estimator.check()
        collision = estimator.estimate(tokens, RowNoise([0, 1])).collision
    assert (collision[:, -1, 3] > 0).all()


@pytest.mark.parametrize("kind", ["mpt", "bloom", "mamba"])
def test_models_that_cannot_be_continued_in_branches_are_refused(kind):
    sizes = {
        "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 1},
        "bloom": {"hidden_size": 16, "n_head": 2, "n_layer": 1},
        "mamba": {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1},
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=30, initializer_range=0.5, **sizes[kind])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad(), pytest.raises(UserError, match="cannot be scored"):
        SoftmaxEstimator(model, LENGTH, 2).check()


def test_samples_that_are_not_finite_are_noticed():
    model, _ = known_calm(2)
    model.head.sample = lambda hidden, count, noise: torch.full((count, *hidden.shape[:-1], 4), torch.nan)
    with torch.no_grad(), pytest.raises(UserError, match="not finite"):
        CalmEstimator(model, LENGTH, 2).estimate(torch.zeros(1, LENGTH + 4, dtype=torch.long), RowNoise([0]))
