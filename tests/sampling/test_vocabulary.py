"""The search finds what the full projection finds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calm.models.autoencoder import ChunkAutoencoder
from calm.models.configuration import ChunkAutoencoderConfig
from calm.sampling import vocabulary
from calm.sampling.vocabulary import VocabularySearch, search_of


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch):
    monkeypatch.setattr(vocabulary, "SMALL", 0)
    monkeypatch.setattr(vocabulary, "PAGE", 8)
    monkeypatch.setattr(vocabulary, "TOGETHER", 16)


def searching(words: torch.Tensor) -> VocabularySearch:
    search = VocabularySearch(words)
    assert search.searches
    return search


def wrong(search: VocabularySearch, states: torch.Tensor) -> int:
    """Answers that are worse than the float64 argmax by more than fp32 can tell apart."""
    logits = states.double() @ search.words.double().T
    found = logits.gather(1, search(states)[:, None])[:, 0]
    rounding = 2e-6 * states.double().norm(dim=1) * search.words.double().norm(dim=1).max()
    return int((logits.amax(1) - found > rounding).sum())


KINDS = {
    "random": lambda g: torch.randn(203, 16, generator=g),
    "lengths of all sizes": lambda g: torch.randn(203, 16, generator=g) * torch.logspace(-3, 3, 203)[:, None],
    "low rank": lambda g: torch.randn(203, 3, generator=g) @ torch.randn(3, 16, generator=g),
    "nearly the same": lambda g: torch.ones(203, 16) + 1e-4 * torch.randn(203, 16, generator=g),
    "pairs of opposites": lambda g: torch.cat([w := torch.randn(100, 16, generator=g), -w]),
    "in a few directions": lambda g: torch.cat([torch.zeros(203, 12), torch.randn(203, 4, generator=g)], 1),
    "with zeros": lambda g: torch.randn(203, 16, generator=g) * (torch.arange(203) % 3 > 0)[:, None],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 3, 100])
def test_equal_to_the_full_argmax(kind, number):
    generator = torch.Generator().manual_seed(0)
    words = KINDS[kind](generator)
    near = words[torch.randint(len(words), (number,), generator=generator)]
    for states in (
        torch.randn(number, 16, generator=generator),
        near * 5 + 0.1 * torch.randn(number, 16, generator=generator),
        -near,
        1e4 * torch.randn(number, 16, generator=generator),
    ):
        assert wrong(searching(words), states) == 0


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 40))
def test_any_words_and_states(seed, number, count):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(number, 5, generator=generator) * torch.rand(number, 1, generator=generator)
    assert wrong(searching(words), torch.randn(count, 5, generator=generator)) == 0


def test_few_words_are_multiplied():
    generator = torch.Generator().manual_seed(1)
    words = torch.randn(3000, 64, generator=generator)
    states = words[:100] + 0.5 * torch.randn(100, 64, generator=generator)
    near, anywhere = searching(words), searching(words)
    assert wrong(near, states) == 0
    assert near.multiplied < 2 * len(states)  # nearly always the word itself alone
    assert wrong(anywhere, torch.randn(100, 64, generator=generator)) == 0
    assert anywhere.multiplied < 0.02 * anywhere.asked


@given(st.integers(0, 10_000), st.floats(-6, 6))
def test_no_product_is_farther_off_than_its_bound(seed, size):
    """The largest product of a page, as it is, lies within the bounds around the rounded one."""
    generator = torch.Generator().manual_seed(seed)
    words = 10.0**size * torch.randn(40, 24, generator=generator) * torch.rand(40, 1, generator=generator)
    search, states = searching(words), torch.randn(5, 24, generator=generator)
    scaled = states * (vocabulary.STATE_LEVELS / states.abs().amax(1, keepdim=True))
    rounded = scaled.round()
    off = scaled.norm(dim=1, keepdim=True) * search.offs + (scaled - rounded).norm(dim=1, keepdim=True) * search.lengths
    true = (scaled.double() @ words.double().T).unflatten(1, (-1, vocabulary.PAGE))
    assert bool(((search._products(rounded) - true).abs() <= off[..., None]).all())


def test_where_bounds_leave_many_words_all_are_read(monkeypatch):
    monkeypatch.setattr(vocabulary, "MOST_LEFT", 100)
    words = KINDS["nearly the same"](generator := torch.Generator().manual_seed(6))
    search = searching(words)
    assert wrong(search, torch.randn(9, 16, generator=generator)) == 0
    assert search.multiplied > 100
    assert search(torch.zeros(2, 16)).shape == (2,)


def test_of_equal_words_the_first():
    words = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    words[33] = words[17] = words[5]
    assert searching(words)(words[5:6]).tolist() == [5]


def test_a_text_has_the_same_words_whoever_is_beside_it():
    generator = torch.Generator().manual_seed(3)
    words, states = torch.randn(300, 16, generator=generator), torch.randn(50, 16, generator=generator)
    search = searching(words)
    alone = torch.cat([search(state) for state in states.split(1)])
    assert torch.equal(search(torch.cat([states, 1e3 * states]))[:50], alone)


def test_a_processor_whose_products_are_wrong_reads_all_words(monkeypatch):
    words = torch.randn(300, 16, generator=torch.Generator().manual_seed(4))
    plain = VocabularySearch._products
    monkeypatch.setattr(VocabularySearch, "_products", lambda self, states: 1.01 * plain(self, states))
    search = VocabularySearch(words)
    assert not search.searches
    assert wrong(search, torch.randn(9, 16)) == 0


def test_words_that_are_not_numbers_are_read_whole():
    words = torch.randn(300, 16)
    words[200, 3] = torch.nan
    assert not VocabularySearch(words).searches


def test_no_states_and_small_vocabularies(monkeypatch):
    words = torch.randn(30, 4, generator=torch.Generator().manual_seed(4))
    assert VocabularySearch(words)(torch.empty(0, 4)).shape == (0,)
    monkeypatch.setattr(vocabulary, "SMALL", 100)
    assert wrong(VocabularySearch(words), torch.randn(9, 4)) == 0


def test_an_autoencoders_search_is_made_once_and_anew_when_its_words_change():
    torch.manual_seed(0)
    config = ChunkAutoencoderConfig(vocab_size=90, chunk_size=2, latent_size=4, hidden_size=8, intermediate_size=8)
    autoencoder = ChunkAutoencoder(config).eval()
    search = search_of(autoencoder)
    assert search_of(autoencoder) is search
    with torch.no_grad():
        autoencoder.embedding.weight.mul_(torch.rand(90, 1))
    assert search_of(autoencoder) is not search
    states = torch.randn(50, 8)
    assert wrong(search_of(autoencoder), states) == 0
