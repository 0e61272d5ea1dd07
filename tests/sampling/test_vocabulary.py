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
    monkeypatch.setattr(vocabulary, "SHEET", 64)


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
    "all in the rest": lambda g: torch.cat([torch.zeros(203, 12), torch.randn(203, 4, generator=g)], 1),
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
        for like in (None, states):
            for directions in (1, 4, 16):
                assert wrong(VocabularySearch(words, like, directions=directions), states) == 0


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 40))
def test_any_words_and_states(seed, number, count):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(number, 5, generator=generator) * torch.rand(number, 1, generator=generator)
    assert wrong(VocabularySearch(words, directions=2), torch.randn(count, 5, generator=generator)) == 0


def test_most_pages_are_never_looked_at_where_states_are_near_words():
    generator = torch.Generator().manual_seed(1)
    words = torch.randn(2000, 32, generator=generator)
    words[:, 12:] *= 0.3
    states = words[:100] + 0.1 * torch.randn(100, 32, generator=generator)
    search = VocabularySearch(words, states)
    assert wrong(search, states) == 0
    assert search.looked_at < 0.3 * search.asked


def test_states_that_repeat_are_answered_once():
    generator = torch.Generator().manual_seed(2)
    words, states = torch.randn(300, 16, generator=generator), torch.randn(20, 16, generator=generator)
    search = VocabularySearch(words)
    expected = search(states)
    pages, search.asked = search.asked, 0
    assert torch.equal(search(states.repeat(7, 1)), expected.repeat(7))
    assert search.asked == pages
    states[:, 0] = 1.0  # the same there, and nowhere else
    assert wrong(search, states) == 0


def test_bounds_come_closer_once_states_are_known(monkeypatch):
    monkeypatch.setattr(vocabulary, "ENOUGH", 200)
    generator = torch.Generator().manual_seed(5)
    words = torch.randn(2000, 32, generator=generator)
    plane = torch.randn(6, 32, generator=generator)
    search, shares = VocabularySearch(words), []
    for _ in range(3):
        states = torch.randn(150, 6, generator=generator) @ plane
        search.looked_at = search.asked = 0
        assert wrong(search, states) == 0
        shares.append(search.looked_at / search.asked)
    assert shares[2] < 0.7 * shares[0]


def test_less_caution_is_faster_and_may_be_wrong():
    generator = torch.Generator().manual_seed(3)
    words, states = torch.randn(3000, 64, generator=generator), torch.randn(200, 64, generator=generator)
    careful, quick = VocabularySearch(words, states), VocabularySearch(words, states, caution=0.6)
    quick(states)
    careful(states)
    assert quick.looked_at < 0.8 * careful.looked_at
    assert wrong(quick, states) < 10


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
    assert search_of(autoencoder, 0.5) is search_of(autoencoder, 0.5) is not search
    with torch.no_grad():
        autoencoder.embedding.weight.mul_(torch.rand(90, 1))
    assert search_of(autoencoder) is not search
    states = torch.randn(50, 8)
    assert wrong(search_of(autoencoder), states) == 0
