"""Sampling methods on the proposals of heads."""

import pytest
import torch

from calm.errors import ConfigError
from calm.generate.sampler import SamplingParams, sample_chunks
from calm.noise import RowNoise, ScaledNoise
from tests.generate.conftest import VOCAB_SIZE, build_model
from tests.generate.test_engine import METHODS, build_transformer, generate


@pytest.mark.parametrize("head", ["flow", "mean-flow", "diffusion"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "exact"])
def test_methods_support_every_vector_head(head, method):
    model = build_model(2, head=head, num_sampling_steps=3)
    assert len(generate(model, [[5, 6, 7]], [0], 4, eos_token_id=-1, **METHODS[method])[0]) == 4


@torch.no_grad()
@pytest.mark.parametrize(("method", "num_candidates"), [(None, None), ("token", 500)])
def test_chain_head_applies_temperature_to_its_softmaxes(method, num_candidates):
    """P(x_k | x_<k)^(1/T), normalized at each k, without candidates; counting many of them comes close."""
    model, temperature, count = build_model(2, head="chain"), 0.5, 4000
    hidden = torch.randn(1, 16, generator=torch.Generator().manual_seed(0)).expand(count, -1)
    vocabulary = model.head.vocabulary
    empty, firsts = torch.empty(0, dtype=torch.long), torch.arange(VOCAB_SIZE)
    first = (vocabulary @ model.head.next_state(hidden[0], empty)).softmax(0) ** (1 / temperature)
    second = (model.head.next_state(hidden[:VOCAB_SIZE], firsts[:, None]) @ vocabulary.T).softmax(-1)
    second = second ** (1 / temperature)
    expected = (first / first.sum())[:, None] * second / second.sum(1, keepdim=True)  # (V, V)
    params = SamplingParams(temperature, num_candidates, method).resolve(model.head)
    output = sample_chunks(model.head, hidden, [params] * count, RowNoise(list(range(count))))
    assert set(output.stats.draws.tolist()) == {num_candidates or 1}
    index = output.chunks @ torch.tensor([VOCAB_SIZE, 1])
    found = torch.bincount(index, minlength=VOCAB_SIZE**2).view(VOCAB_SIZE, VOCAB_SIZE) / count
    error = (expected * (1 - expected) / count).sqrt()
    bias = 0.02 if num_candidates else 1e-3  # 500 candidates have not quite converged
    assert ((found - expected).abs() < 4.5 * error + bias).all()


@torch.no_grad()
def test_transformer_samples_from_its_softmax():
    """Chi-square of 4,000 first tokens at T = 0.5 against its own probabilities, squared and normalized."""
    model, count = build_transformer(), 4000
    tokens = torch.tensor([[5, 6]])
    expected = (2 * model.logits(tokens)[0, -1]).softmax(-1)
    hidden = model.backbone(model.embed(tokens[..., None]))[:, -1].expand(count, -1)
    params = SamplingParams(0.5).resolve(model.head)
    sampled = sample_chunks(model.head, hidden, [params] * count, RowNoise(list(range(count)))).chunks[:, 0]
    found = torch.bincount(sampled, minlength=VOCAB_SIZE)
    often = expected * count >= 5
    statistic = ((found - expected * count) ** 2 / (expected * count))[often].sum()
    assert statistic < int(often.sum()) + 4 * (2 * int(often.sum())) ** 0.5  # mean and standard deviations


def test_default_method_depends_on_the_head():
    energy, chain, softmax = build_model(2).head, build_model(2, head="chain").head, build_transformer().head
    assert SamplingParams(0.5).resolve(energy).method == "token"
    assert SamplingParams().resolve(chain).method == "token"  # one draw
    assert SamplingParams(top_p=0.9).resolve(chain).method == SamplingParams(1.5).resolve(chain).method == "mixture"
    assert SamplingParams().resolve(softmax).method == "mixture"
    probit = build_model(2, head="probit").head
    assert SamplingParams(0.5).resolve(probit).method == "noise"
    assert SamplingParams(0.5, top_k=3).resolve(probit).method == "mixture"


def test_unsupported_params_are_refused():
    energy, chain = build_model(2).head, build_model(2, head="chain").head
    with pytest.raises(ConfigError, match="at most 1, not 1.5"):
        SamplingParams(1.5).resolve(energy)
    with pytest.raises(ConfigError, match="no noise to scale"):
        SamplingParams(0.5, method="noise").resolve(chain)
    with pytest.raises(ConfigError, match="top_p needs token probabilities"):
        SamplingParams(top_p=0.9).resolve(energy)


def test_low_temperature_reduces_diversity():
    model, prompts, seeds = build_model(2), [[5, 6, 7]] * 60, list(range(60))
    distinct = {
        method: len({tuple(output) for output in generate(model, prompts, seeds, 2, eos_token_id=-1, **options)})
        for method, options in {
            "temperature 1": {},
            "token": {"method": "token", "temperature": 0.1},
            "batch": {"method": "batch", "temperature": 0.1},
            "mixture": {"method": "mixture", "temperature": 0.1},
        }.items()
    }
    for method in ("token", "batch", "mixture"):
        assert distinct[method] < distinct["temperature 1"] / 2


@torch.no_grad()
def test_scaled_noise_reduces_the_spread_of_latents():
    model = build_model(2, head="flow", num_sampling_steps=3)  # an energy head normalizes its noise embedding
    hidden = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    spread = {}
    for scale in (1.0, 0.001):
        noise = ScaledNoise(RowNoise([0, 1]), torch.tensor([scale, scale])).rows([1])
        spread[scale] = float(model.head.sample(hidden, 200, noise).std(0).mean())
    assert spread[0.001] < 0.5 * spread[1.0]


@torch.no_grad()
def test_temperature_zero():
    """The most frequent token or chunk among the same draws; the most probable tokens; a draw without noise."""
    model, rows, number = build_model(2), 6, 50
    hidden = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0))

    def sample(method: str, seed: int, head=model.head):
        params = SamplingParams(0, number, method).resolve(head)
        return sample_chunks(head, hidden, [params] * rows, RowNoise(list(range(seed, seed + rows)))).chunks

    candidates = model.head.propose(hidden, number, RowNoise(list(range(rows)))).tokens()  # (N, B, K)
    for method, size in (("token", 1), ("batch", 2)):
        same = (candidates[:, None, :, :size] == candidates[None, :, :, :size]).all(-1).sum(1)  # (N, B): occurrences
        chosen = (candidates[..., :size] == sample(method, 0)[:, :size]).all(-1).sum(0)
        assert chosen.tolist() == same.amax(0).tolist()
    assert sample("noise", 0).tolist() == sample("noise", 7).tolist()
    for head in (build_model(2, head="chain").head, build_transformer().head):
        chunks = sample("mixture", 0, head)
        assert chunks.tolist() == sample("mixture", 7, head).tolist()
        for k in range(head.chunk_size):
            log_probs = head.propose(hidden, 1, RowNoise([0] * rows)).log_probs(chunks[:, :k])[0]
            assert chunks[:, k].tolist() == log_probs.argmax(-1).tolist()
    with pytest.raises(ConfigError, match="above 0 with the method 'exact'"):
        SamplingParams(0, method="exact")
