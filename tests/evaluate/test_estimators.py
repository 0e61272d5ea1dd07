"""Accuracy and collision of n-grams against enumeration, for models whose probabilities are known."""

import itertools
import math
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from transformers import LlamaConfig as TransformersLlamaConfig

from calm.errors import UserError
from calm.evaluate import estimators as module
from calm.evaluate.branches import Branches, check_branches
from calm.evaluate.estimators import PrefixEstimator, SampleEstimator, estimator_of
from calm.hf import HFTransformer
from calm.llama import LlamaConfig
from calm.model import Calm, PlainCalmConfig
from calm.noise import RowNoise, draw_uniform
from calm.transformer import Transformer

V, LENGTH = 2, 8
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def new_calm(chunk_size: int, **fields) -> Calm:
    torch.manual_seed(0)
    autoencoder = {"vocab_size": V, "chunk_size": chunk_size, "latent_size": 4, "hidden_size": 8}
    autoencoder["intermediate_size"] = 8
    backbone = {**SMALL, "vocab_size": V, "initializer_range": 0.5}
    return Calm(PlainCalmConfig(backbone, autoencoder, **fields)).eval()


def known_calm(chunk_size: int) -> tuple[Calm, torch.Tensor]:
    """A model whose head draws token k of a chunk from softmax(W_k·hidden), independently of the other tokens."""
    model = new_calm(chunk_size)
    weights = 0.15 * torch.randn(chunk_size, V, 16)  # small, so that every outcome is drawn now and then

    def sample(hidden, num_samples, generator=None):
        uniform = draw_uniform(generator, hidden, num_samples, chunk_size)
        return torch.cat([hidden.expand(num_samples, *hidden.shape), uniform], dim=-1)

    def tokens(latents):
        hidden, uniform = latents[..., :16], latents[..., 16:]
        first = torch.einsum("kvh,...h->...kv", weights, hidden).softmax(-1)[..., 0]
        return (uniform >= first).long()

    model.head.sample, model.autoencoder.tokens = sample, tokens
    return model, weights


def chain_calm(chunk_size: int) -> Calm:
    """A model with token probabilities, in which tokens of a chunk depend on each other."""
    model = new_calm(chunk_size, head="chain", num_head_layers=1)
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.normal_(model.autoencoder.embedding.weight)
    return model


def exact(probability, text: list[int], start: int) -> tuple[list[float], list[float]]:
    """P(y) and Σ P(x)² of the n tokens from a start, n = 1 to 4; `probability(prefix, token)`."""
    accuracy, collision = [], []
    for n in range(1, 5):
        total = 0.0
        for continuation in itertools.product(range(V), repeat=n):
            p = 1.0
            for place, token in enumerate(continuation):
                p *= probability(tuple(text[:start]) + continuation[:place], token)
            total += p * p
            if list(continuation) == text[start : start + n]:
                accuracy.append(p)
        collision.append(total)
    return accuracy, collision


def calm_probability(model, weights):
    size = model.chunk_size

    @cache
    def chunk_probabilities(before: tuple[int, ...]) -> torch.Tensor:
        hidden = model.hidden_states(torch.tensor(before).view(1, -1, size))[0, -1]
        return torch.einsum("kvh,h->kv", weights, hidden).softmax(-1)

    def probability(prefix, token):
        whole = len(prefix) // size * size  # tokens of a chunk depend on earlier chunks only
        return chunk_probabilities(prefix[:whole])[len(prefix) - whole, token].item()

    return probability


def chain_probability(model):
    size = model.chunk_size

    @cache
    def probabilities(prefix: tuple[int, ...]) -> torch.Tensor:
        whole = len(prefix) // size * size
        hidden = model.hidden_states(torch.tensor(prefix[:whole]).view(1, -1, size))[:, -1]
        states = model.head.states(hidden, torch.tensor([prefix[whole:]], dtype=torch.long))
        return (states[0, -1] @ model.head.vocabulary.T).softmax(-1)

    return lambda prefix, token: probabilities(prefix)[token].item()


def check(estimator, probability, tokens, rounds):
    """The mean over many seeds equals the exact value within four standard errors (160 comparisons)."""
    drawn = [estimator.estimate(tokens, RowNoise([2 * r, 2 * r + 1])) for r in range(rounds)]
    size = estimator.chunk_size
    for kind in (0, 1):
        found = torch.stack([pair[kind] for pair in drawn])
        mean, error = found.mean(0), found.std(0) / rounds**0.5
        for row in range(len(tokens)):
            for place, start in enumerate(range(size, estimator.length + 1, size)):
                expected = torch.tensor(exact(probability, tokens[row].tolist(), start)[kind])
                assert ((mean[row, place] - expected).abs() <= 4 * error[row, place] + 1e-6).all(), (kind, row, start)


@pytest.mark.parametrize(("chunk_size", "num_samples"), [(1, 2), (1, 3), (2, 2), (2, 4), (4, 2), (4, 5), (8, 2)])
def test_sample_estimator_is_unbiased(chunk_size, num_samples):
    model, weights = known_calm(chunk_size)
    with torch.no_grad():
        check(SampleEstimator(model, LENGTH, num_samples), calm_probability(model, weights), some_tokens(), rounds=400)


@pytest.mark.parametrize("chunk_size", [2, 3, 4])
def test_sample_estimator_is_unbiased_for_dependent_tokens(chunk_size):
    model, length = chain_calm(chunk_size), LENGTH - LENGTH % chunk_size
    with torch.no_grad():
        check(SampleEstimator(model, length, 3), chain_probability(model), some_tokens(length), rounds=400)


def some_tokens(length=LENGTH, rows=2):
    return torch.randint(V, (rows, length + 4), generator=torch.Generator().manual_seed(1))


def new_transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer(LlamaConfig(**SMALL, vocab_size=V, initializer_range=0.5)).eval()


def foreign_transformer() -> HFTransformer:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=16, n_head=2, n_layer=2, initializer_range=0.5))
    return HFTransformer(model).eval()


def transformer_probability(model):
    @cache
    def probabilities(prefix: tuple[int, ...]) -> torch.Tensor:
        return model.logits(torch.tensor([prefix]))[0, -1].softmax(-1)

    return lambda prefix, token: probabilities(prefix)[token].item()


@pytest.mark.parametrize("make", [new_transformer, foreign_transformer])
def test_sample_estimator_takes_any_model(make):
    model = make()
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(0.3)  # less confident, so that every outcome is drawn now and then
        check(SampleEstimator(model, LENGTH, 2), transformer_probability(model), some_tokens(), rounds=400)


@pytest.mark.parametrize("make", [new_transformer, foreign_transformer, lambda: chain_calm(1)])
def test_prefix_estimator_is_exact_by_enumeration_and_otherwise_unbiased(make, monkeypatch):
    model, tokens = make(), some_tokens()
    probability = chain_probability(model) if isinstance(model, Calm) else transformer_probability(model)
    with torch.no_grad():
        accuracy, collision, nats = PrefixEstimator(model, LENGTH, 2).estimate(tokens, RowNoise([0, 1]))
        torch.testing.assert_close(nats, -accuracy[..., 0].log())
        for row, start in itertools.product(range(2), range(1, LENGTH + 1)):
            expected = exact(probability, tokens[row].tolist(), start)
            torch.testing.assert_close(accuracy[row, start - 1], torch.tensor(expected[0]), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(collision[row, start - 1], torch.tensor(expected[1]), rtol=1e-4, atol=1e-6)
        monkeypatch.setattr(module, "MAX_BRANCHES", 20)  # slices do not change the result
        sliced = PrefixEstimator(model, LENGTH, 2).estimate(tokens, RowNoise([0, 1]))
        torch.testing.assert_close(sliced.collision, collision)
        monkeypatch.setattr(module, "ENUMERABLE", 0)
        for num_samples in (2, 7):
            check(PrefixEstimator(model, LENGTH, num_samples), probability, tokens, rounds=400)


def test_estimators_suit_their_models():
    """Models with token probabilities and chunks of one token have exact estimates; all others are sampled."""
    for model in (new_transformer(), foreign_transformer(), chain_calm(1)):
        assert isinstance(estimator_of(model, LENGTH, 2), PrefixEstimator)
    for model in (new_calm(1), new_calm(4), chain_calm(2)):
        assert isinstance(estimator_of(model, LENGTH, 2), SampleEstimator)


def test_cross_entropy_is_exact_for_a_chain_and_a_bound_for_latents():
    tokens = some_tokens()
    for model in (chain_calm(2), new_calm(2)):
        with torch.no_grad():
            without, nats = (estimator_of(model, LENGTH, 2, n).estimate(tokens, RowNoise([0, 1])).nats for n in (0, 64))
        assert without is None
        assert nats.shape == (2, LENGTH)
        if model.head.exact_likelihood:
            probability = chain_probability(model)
            for row, place in itertools.product(range(2), range(2, LENGTH + 2)):
                text = tokens[row].tolist()
                expected = -math.log(probability(tuple(text[:place]), text[place]))
                assert nats[row, place - 2].item() == pytest.approx(expected, rel=1e-4)


def expected_score(probability, other, prefix) -> torch.Tensor:
    """Expected Brier-n of `other` for text from `probability`, n = 1 to 4, by enumeration."""
    found = []
    for n in range(1, 5):
        total = 0.0
        for y in itertools.product(range(V), repeat=n):
            p, q = (
                math.prod(each((*prefix, *y[:k]), token) for k, token in enumerate(y)) for each in (probability, other)
            )
            total += 2 * p * q - q * q
        found.append(total)
    return torch.tensor(found)


def perturbed(kind, factor):
    """A model with scaled logits: its estimator and its probabilities."""
    if kind == "transformer":
        model = new_transformer()
        model.lm_head.weight.data.mul_(factor)
        return PrefixEstimator(model, LENGTH, 2), transformer_probability(model)
    model, weights = known_calm(kind)
    weights.mul_(factor)
    return SampleEstimator(model, LENGTH, 2), calm_probability(model, weights)


@pytest.mark.parametrize("kind", [1, 2, 4, 8, "transformer"])
def test_perturbed_models_score_lower(kind, monkeypatch):
    """The batch holds every text of 4 tokens, weighted by its true probability: only the samples are random."""
    torch.manual_seed(1)
    prefix = torch.randint(V, (LENGTH,)).tolist()
    texts = list(itertools.product(range(V), repeat=4))
    tokens = torch.tensor([[*prefix, *text] for text in texts])
    monkeypatch.setattr(module, "ENUMERABLE", 0)
    _, truth = perturbed(kind, 1.0)
    weights = torch.tensor([exact(truth, [*prefix, *text], LENGTH)[0][3] for text in texts])
    scores, rounds = [], 300
    with torch.no_grad():
        for factor in (1.0, 8.0, -4.0):  # the true model, an overconfident one, and a wrong one
            estimator, probability = perturbed(kind, factor)
            exactly = expected_score(truth, probability, prefix)
            drawn = []
            for r in range(rounds):
                accuracy, collision, _ = estimator.estimate(tokens, RowNoise([100 * r + i for i in range(len(texts))]))
                drawn.append((weights[:, None] * (2 * accuracy - collision)[:, -1]).sum(0))
            mean, error = torch.stack(drawn).mean(0), torch.stack(drawn).std(0) / rounds**0.5
            unseen = 3 / (rounds * len(texts))  # bound on the probability of outcomes that were never drawn
            assert ((mean - exactly).abs() < 3.5 * error + unseen).all()
            scores.append((exactly, mean))
    for exactly, mean in scores[1:]:
        assert (exactly < scores[0][0]).all()
        clear = scores[0][0] - exactly > 0.03  # larger than the noise of the samples
        assert clear.sum() >= 2
        assert (mean < scores[0][1])[clear].all()


def transformer_with(attention: str):
    """Our Llama, or transformers' with some implementation of attention."""
    torch.manual_seed(0)
    fields = {**SMALL, "vocab_size": 30, "initializer_range": 0.5}
    if attention == "own":
        return Transformer(LlamaConfig(**fields)).eval()
    config = TransformersLlamaConfig(**fields, attn_implementation=attention)
    return HFTransformer(LlamaForCausalLM(config)).eval()


@pytest.mark.parametrize("attention", ["own", "eager", "sdpa"])
def test_branch_attends_only_to_its_own_past(attention):
    """Hidden states of branches equal those of each text read from its beginning."""
    model = transformer_with(attention)
    branches = Branches(model.backbone)
    tokens, rest = torch.randint(30, (2, 6)), torch.randint(30, (5, 3))
    parents = [torch.tensor([1, 4, 4, 6, 11]), torch.tensor([0, 2, 3, 3, 4]), torch.tensor([1, 4, 4, 4, 4])]
    texts = [[*tokens[node // 6, : node % 6 + 1].tolist()] for node in range(12)]

    def read(text):
        if isinstance(model, HFTransformer):  # whose hidden states are the logits
            return model.logits(torch.tensor([text]))[0, -1]
        return model.backbone(model.embed(torch.tensor([text])[..., None]))[0, -1]

    with torch.no_grad():
        branches.read(model.embed(tokens[..., None]))
        branches.start_at(0, 3)
        branches.grow(torch.tensor([1, 4]), model.embed(rest[:2, :1]))  # dropped by the next start_at
        branches.start_at(0, 6)
        for step, nodes in enumerate(parents):
            texts = [[*texts[node], rest[number, step].item()] for number, node in enumerate(nodes.tolist())]
            states = branches.grow(nodes, model.embed(rest[:, step : step + 1]))
            for text, state in zip(texts, states, strict=True):
                torch.testing.assert_close(state, read(text), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [lambda: known_calm(2)[0], lambda: chain_calm(2), new_transformer])
def test_estimates_of_a_row_do_not_depend_on_the_batch(make):
    model, tokens = make(), some_tokens(rows=3)
    with torch.no_grad():
        together = SampleEstimator(model, LENGTH, 2).estimate(tokens, RowNoise([5, 6, 7]))
        alone = SampleEstimator(model, LENGTH, 2).estimate(tokens[1:2], RowNoise([6]))
    assert torch.equal(together.accuracy[1:2], alone.accuracy)
    assert torch.equal(together.collision[1:2], alone.collision)


def test_all_positions_are_used_and_no_more():
    """A window, the four tokens after it and all branches fit learnt positions exactly."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=30, n_embd=16, n_head=2, n_layer=1, n_positions=LENGTH + 4 - 1)
    model = GPT2LMHeadModel(config)
    model.transformer.wte.weight.data.mul_(50)  # confident, so that branches go on
    tokens = torch.randint(30, (2, LENGTH + 4))
    with torch.no_grad():
        estimator = PrefixEstimator(HFTransformer(model).eval(), LENGTH, 64)
        check_branches(estimator.model)
        collision = estimator.estimate(tokens, RowNoise([0, 1])).collision
    assert (collision[:, -1, 3] > 0).all()


@pytest.mark.parametrize("kind", ["mpt", "bloom", "mamba"])
def test_architectures_without_branches_are_refused(kind):
    sizes = {
        "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 1},
        "bloom": {"hidden_size": 16, "n_head": 2, "n_layer": 1},
        "mamba": {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1},
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=30, initializer_range=0.5, **sizes[kind])
    model = HFTransformer(AutoModelForCausalLM.from_config(config)).eval()
    with pytest.raises(UserError, match="cannot be scored"):
        check_branches(model)


def test_samples_that_are_not_finite_are_refused():
    model, _ = known_calm(2)
    model.head.sample = lambda hidden, count, noise: torch.full((count, *hidden.shape[:-1], 4), torch.nan)
    with torch.no_grad(), pytest.raises(UserError, match="not finite"):
        SampleEstimator(model, LENGTH, 2).estimate(torch.zeros(1, LENGTH + 4, dtype=torch.long), RowNoise([0]))
