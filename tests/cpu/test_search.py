"""The int8 search finds what the full projection finds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calm.autoencoder import Autoencoder, AutoencoderConfig, NearestTokens
from calm.cpu import search
from calm.cpu.search import Int8NearestTokens, VocabularySearch, replace_search


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch):
    monkeypatch.setattr(search, "MIN_VOCABULARY", 0)
    monkeypatch.setattr(search, "PAGE", 8)
    monkeypatch.setattr(search, "STATES_AT_ONCE", 16)


def make_search(vocabulary: torch.Tensor) -> VocabularySearch:
    found = VocabularySearch(vocabulary)
    assert found.searches
    return found


def count_errors(search: VocabularySearch, states: torch.Tensor) -> int:
    """Tokens that are worse than the float64 argmax by more than fp32 can tell apart."""
    logits = states.double() @ search.vocabulary.double().T
    found = logits.gather(1, search(states)[:, None])[:, 0]
    rounding = 2e-6 * states.double().norm(dim=1) * search.vocabulary.double().norm(dim=1).max()
    return int((logits.amax(1) - found > rounding).sum())


VOCABULARIES = {
    "random": lambda g: torch.randn(203, 16, generator=g),
    "norms of all magnitudes": lambda g: torch.randn(203, 16, generator=g) * torch.logspace(-3, 3, 203)[:, None],
    "low rank": lambda g: torch.randn(203, 3, generator=g) @ torch.randn(3, 16, generator=g),
    "nearly equal": lambda g: torch.ones(203, 16) + 1e-4 * torch.randn(203, 16, generator=g),
    "opposite pairs": lambda g: torch.cat([w := torch.randn(100, 16, generator=g), -w]),
    "few dimensions": lambda g: torch.cat([torch.zeros(203, 12), torch.randn(203, 4, generator=g)], 1),
    "with zeros": lambda g: torch.randn(203, 16, generator=g) * (torch.arange(203) % 3 > 0)[:, None],
}


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize("count", [1, 3, 100])
def test_equals_full_argmax(kind, count):
    generator = torch.Generator().manual_seed(0)
    vocabulary = VOCABULARIES[kind](generator)
    near = vocabulary[torch.randint(len(vocabulary), (count,), generator=generator)]
    for states in (
        torch.randn(count, 16, generator=generator),
        near * 5 + 0.1 * torch.randn(count, 16, generator=generator),
        -near,
        1e4 * torch.randn(count, 16, generator=generator),
    ):
        assert count_errors(make_search(vocabulary), states) == 0


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 40))
def test_any_vocabulary_and_states(seed, size, count):
    generator = torch.Generator().manual_seed(seed)
    vocabulary = torch.randn(size, 5, generator=generator) * torch.rand(size, 1, generator=generator)
    assert count_errors(make_search(vocabulary), torch.randn(count, 5, generator=generator)) == 0


def test_few_tokens_are_multiplied_in_fp32():
    generator = torch.Generator().manual_seed(1)
    vocabulary = torch.randn(3000, 64, generator=generator)
    states = vocabulary[:100] + 0.5 * torch.randn(100, 64, generator=generator)
    near, anywhere = make_search(vocabulary), make_search(vocabulary)
    assert count_errors(near, states) == 0
    assert near.multiplied < 2 * len(states)  # nearly always the token alone
    assert count_errors(anywhere, torch.randn(100, 64, generator=generator)) == 0
    assert anywhere.multiplied < 0.02 * anywhere.asked


@given(st.integers(0, 10_000), st.floats(-6, 6))
def test_errors_of_integer_products_are_within_their_bounds(seed, magnitude):
    generator = torch.Generator().manual_seed(seed)
    vocabulary = 10.0**magnitude * torch.randn(40, 24, generator=generator) * torch.rand(40, 1, generator=generator)
    found, states = make_search(vocabulary), torch.randn(5, 24, generator=generator)
    scaled = states * (search.STATE_LEVELS / states.abs().amax(1, keepdim=True))
    rounded = scaled.round()
    bound = scaled.norm(dim=1, keepdim=True) * found.offs + (scaled - rounded).norm(dim=1, keepdim=True) * found.lengths
    exact = (scaled.double() @ vocabulary.double().T).unflatten(1, (-1, search.PAGE))
    assert bool(((found._products(rounded) - exact).abs() <= bound[..., None]).all())


def test_too_many_candidates_compute_all_products(monkeypatch):
    monkeypatch.setattr(search, "MAX_CANDIDATES", 100)
    vocabulary = VOCABULARIES["nearly equal"](generator := torch.Generator().manual_seed(6))
    found = make_search(vocabulary)
    assert count_errors(found, torch.randn(9, 16, generator=generator)) == 0
    assert found.multiplied > 100
    assert found(torch.zeros(2, 16)).shape == (2,)


def test_first_of_equal_tokens():
    vocabulary = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    vocabulary[33] = vocabulary[17] = vocabulary[5]
    assert make_search(vocabulary)(vocabulary[5:6]).tolist() == [5]


def test_result_does_not_depend_on_other_rows():
    generator = torch.Generator().manual_seed(3)
    vocabulary, states = torch.randn(300, 16, generator=generator), torch.randn(50, 16, generator=generator)
    found = make_search(vocabulary)
    alone = torch.cat([found(state) for state in states.split(1)])
    assert torch.equal(found(torch.cat([states, 1e3 * states]))[:50], alone)


def test_inexact_integer_products_disable_the_search(monkeypatch):
    vocabulary = torch.randn(300, 16, generator=torch.Generator().manual_seed(4))
    products = VocabularySearch._products
    monkeypatch.setattr(VocabularySearch, "_products", lambda self, states: 1.01 * products(self, states))
    found = VocabularySearch(vocabulary)
    assert not found.searches
    assert count_errors(found, torch.randn(9, 16)) == 0


def test_nan_disables_the_search():
    vocabulary = torch.randn(300, 16)
    vocabulary[200, 3] = torch.nan
    assert not VocabularySearch(vocabulary).searches


def test_no_states_and_small_vocabularies(monkeypatch):
    vocabulary = torch.randn(30, 4, generator=torch.Generator().manual_seed(4))
    assert VocabularySearch(vocabulary)(torch.empty(0, 4)).shape == (0,)
    monkeypatch.setattr(search, "MIN_VOCABULARY", 100)
    found = VocabularySearch(vocabulary)
    assert not found.searches
    assert count_errors(found, torch.randn(9, 4)) == 0


def make_autoencoder() -> Autoencoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "chunk_size": 2, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    return Autoencoder(AutoencoderConfig(**sizes)).eval()


def test_search_is_prepared_once_until_the_vocabulary_changes():
    autoencoder = make_autoencoder()
    replace_search(autoencoder)
    nearest, vocabulary = autoencoder.nearest, autoencoder.embedding.weight
    assert type(nearest) is Int8NearestTokens
    prepared = nearest.search(vocabulary)
    assert prepared.searches
    assert nearest.search(vocabulary) is prepared
    with torch.no_grad():
        vocabulary.mul_(torch.rand(90, 1))
    again = nearest.search(vocabulary)
    assert again is not prepared
    assert nearest.search(vocabulary) is again
    states = torch.randn(50, 8)
    assert count_errors(again, states) == 0
    assert torch.equal(nearest(states, vocabulary), again(states))
    vocabulary.data = torch.randn(90, 8)
    assert nearest.search(vocabulary) is not again


def test_autoencoder_finds_the_same_tokens():
    autoencoder, latents = make_autoencoder(), torch.randn(3, 7, 4)
    with torch.no_grad():
        expected = autoencoder.tokens(latents)
        replace_search(autoencoder)
        found = autoencoder.tokens(latents)
    assert found.shape == (3, 7, 2)
    assert torch.equal(found, expected)
    replaced = autoencoder.nearest
    replace_search(autoencoder)
    assert autoencoder.nearest is replaced


def test_streamed_memory(monkeypatch):
    vocabulary = torch.randn(80, 8)
    assert NearestTokens().streamed(vocabulary).nbytes == vocabulary.nbytes
    assert Int8NearestTokens().streamed(vocabulary).nbytes == vocabulary.nbytes // 4
    monkeypatch.setattr(search, "MIN_VOCABULARY", 100)
    assert Int8NearestTokens().streamed(vocabulary).nbytes == vocabulary.nbytes
