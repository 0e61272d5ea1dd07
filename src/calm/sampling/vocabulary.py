"""The most probable word of a state, argmax over v of w_v·g, reading the vocabulary in eight bits. Exact.

Rounded words ŵ and a rounded state ĝ have a product in whole numbers, which is fast, and which cannot be far off:

    w·g  =  ŵ·ĝ + (w - ŵ)·g + ŵ·(g - ĝ)        |w·g - ŵ·ĝ|  ≤  |w - ŵ|·|g| + |ŵ|·|g - ĝ|        (Cauchy-Schwarz)

A word with a large product is multiplied as it is. Words that may be better by these bounds, a handful of a hundred
thousand, are so, too.
"""

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from calm.models.codec import Codec
from calm.scores.vocabulary import most_probable_words

SMALL = 2**14  # a vocabulary that is as quickly read as searched
PAGE = 512  # words that share a bound
TOGETHER = 64  # states
WORD_LEVELS = 127
# The library rounds states to 128 levels between their least and their largest number. Two more numbers, which meet
# zeros, are just that far apart: then the levels are the whole numbers, and what is whole already stays as it is.
STATE_LEVELS = 63
RANGE = (-63.0, 64.0)
MOST_LEFT = 2**16  # words and states that are multiplied one by one; where bounds leave more, all are read
TINY = 1e-20  # a scale for what is zero
ROUNDING = 1e-5  # of |w|·|g|: more than what fp32 can be off


def search_of(autoencoder: Codec) -> "VocabularySearch":
    """The search for an autoencoder's words, made once as long as they stay what they are."""
    words = autoencoder.embedding.weight
    state = (words.data_ptr(), 0 if words.is_inference() else words._version, words.dtype)
    if autoencoder not in _MADE or _MADE[autoencoder][0] != state:
        _MADE[autoencoder] = state, VocabularySearch(words.detach())
    return _MADE[autoencoder][1]


_MADE: "WeakKeyDictionary[Codec, tuple[tuple, VocabularySearch]]" = WeakKeyDictionary()


class VocabularySearch:
    """Answers for one matrix of words (V, d), which must not change."""

    def __init__(self, words: Tensor):
        self.words = words
        self.multiplied = self.asked = 0  # words that the bounds left, of how many there were for the states so far
        self.searches = len(words) > SMALL and words.device.type == "cpu" and self._round_words()

    @torch.no_grad()
    def _round_words(self) -> bool:
        """Lay the words out in eight bits; whether this processor's product of whole numbers is what it should be."""
        count, size = self.words.shape
        places = torch.arange(-(-count // PAGE) * PAGE).clamp(max=count - 1)  # the last word fills the last page
        whole, scales = torch.zeros(len(places), size + len(RANGE), dtype=torch.int8), torch.empty(len(places))
        lengths, offs = torch.empty(len(places)), torch.empty(len(places))
        for here in torch.arange(len(places)).split(PAGE * TOGETHER):  # a second copy in fp32 would be a large one
            words = self.words[places[here]].float()
            scales[here] = words.abs().amax(1).clamp(min=TINY) / WORD_LEVELS
            rounded = (words / scales[here, None]).round()
            whole[here, :size] = rounded.to(torch.int8)
            rounded *= scales[here, None]
            lengths[here], offs[here] = rounded.norm(dim=1), (words - rounded).norm(dim=1)
        self.packed = _packed(whole, scales)
        self.lengths = _by_page(lengths)
        self.offs = _by_page(offs) + ROUNDING * self.lengths
        return bool(self.offs.isfinite().all()) and self._is_right(whole[:PAGE, :size], scales[:PAGE])

    def _is_right(self, words: Tensor, scales: Tensor) -> bool:
        """Whether the product of some states with the first page is, to fp32's rounding, that of whole numbers."""
        levels = torch.arange(-STATE_LEVELS, STATE_LEVELS + 1.0)
        states = levels[torch.arange(2 * words.shape[1]) * 7 % len(levels)].view(2, -1)
        expected = (states.double() @ words.double().T) * scales
        error = (self._products(states)[:, 0] - expected).abs()
        return bool((error <= ROUNDING * states.norm(dim=1, keepdim=True) * self.lengths[0]).all())

    def _products(self, states: Tensor) -> Tensor:
        """ŵ·ĝ of all words and states of whole numbers (n, d): (n, pages, words)."""
        limits = states.new_tensor(RANGE).expand(len(states), -1)
        found = torch.ops.quantized.linear_dynamic(torch.cat([states, limits], dim=1), self.packed, True)
        return found.unflatten(1, (-1, PAGE))

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Tensor:
        """(n, d) → (n,)."""
        if not self.searches or not len(states):
            return most_probable_words(states, self.words)
        return torch.cat([self._search(part) for part in states.split(TOGETHER)])

    def _search(self, states: Tensor) -> Tensor:
        states = states.float()
        scaled = states * (STATE_LEVELS / states.abs().amax(1, keepdim=True).clamp(min=TINY))
        rounded = scaled.round()
        products = self._products(rounded)
        length = scaled.norm(dim=1, keepdim=True)
        off = length * self.offs + (scaled - rounded).norm(dim=1, keepdim=True) * self.lengths
        largest = products.amax(2)  # (n, pages)
        page = (largest - off).argmax(1)
        word = self._word(page, products[torch.arange(len(states)), page].argmax(1))
        sure = (scaled * self.words[word].float()).sum(1, keepdim=True) - 2 * ROUNDING * length * self.lengths.amax()
        least = sure - off  # a product below it is of a word that is not the best
        row, page = (largest >= least).nonzero(as_tuple=True)
        place, word = (products[row, page] >= least[row, page][:, None]).nonzero(as_tuple=True)
        self.multiplied += len(word)
        self.asked += len(states) * len(self.words)
        if len(word) > MOST_LEFT:  # as where all words are the same
            return most_probable_words(states, self.words)
        row, word = row[place], self._word(page[place], word)
        return _best(row, word, (states[row] * self.words[word].float()).sum(1), len(states))

    def _word(self, page: Tensor, place: Tensor) -> Tensor:
        """Which words stand at some places of pages; the last one stands everywhere behind itself."""
        return (PAGE * page + place).clamp_(max=len(self.words) - 1)


def _packed(whole: Tensor, scales: Tensor) -> Any:
    """Matrices of whole numbers (m, d) and the scales of their rows, as the library multiplies them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that another package will take over
        zeros = torch.zeros(len(scales), dtype=torch.long)
        matrix = torch._make_per_channel_quantized_tensor(  # pyright: ignore[reportPrivateImportUsage]
            whole, scales.double(), zeros, 0
        )
    return torch.ops.quantized.linear_prepack(matrix, None)


def _by_page(values: Tensor) -> Tensor:
    """The largest of each page: (pages,)."""
    return values.unflatten(0, (-1, PAGE)).amax(1)


def _best(rows: Tensor, words: Tensor, values: Tensor, count: int) -> Tensor:
    """Of each row its word with the largest value, of several the first: (count,)."""
    most = values.new_full((count,), -torch.inf).scatter_reduce(0, rows, values, "amax")
    won = values == most[rows]
    return words.new_zeros(count).scatter_reduce(0, rows[won], words[won], "amin", include_self=False)
