"""Argmax over a large vocabulary, argmax over v of w_v·g, reading it in int8. Exact.

Rounded token vectors ŵ and a rounded state ĝ have an integer product, which is fast, and whose error is bounded:

    w·g  =  ŵ·ĝ + (w - ŵ)·g + ŵ·(g - ĝ)        |w·g - ŵ·ĝ|  ≤  |w - ŵ|·|g| + |ŵ|·|g - ĝ|        (Cauchy-Schwarz)

One token with a large integer product is multiplied in fp32. Tokens that may be better by these bounds, a handful of a
hundred thousand, are multiplied in fp32 as well.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from calm.autoencoder import Autoencoder, NearestTokens
from calm.cpu.linear import FastProjection
from calm.scores.vocabulary import most_probable_tokens

MIN_VOCABULARY = 2**14  # smaller ones are as quickly read as searched
PAGE = 512  # tokens that share a bound
STATES_AT_ONCE = 64
WEIGHT_LEVELS = 127
# The library quantizes states to 128 levels between their minimum and maximum. Two more numbers, which meet zeros, are
# just that far apart: then the levels are the integers, and what is an integer already stays as it is.
STATE_LEVELS = 63
RANGE = (-63.0, 64.0)
MAX_CANDIDATES = 2**16  # products in fp32; if the bounds leave more, all are computed
TINY = 1e-20  # a scale for zeros
ROUNDING = 1e-5  # of |w|·|g|: more than the rounding error of fp32


PROJECT = FastProjection().forward  # for vocabularies that are read instead of searched


class Int8NearestTokens(NearestTokens):
    """`NearestTokens` by an int8 search, which is prepared once as long as the vocabulary stays the same."""

    state: tuple | None = None

    def search(self, vocabulary: Tensor) -> "VocabularySearch":
        version = 0 if vocabulary.is_inference() else vocabulary._version
        state = (vocabulary.data_ptr(), version, vocabulary.dtype, vocabulary.shape)
        if self.state != state:
            self.state, self.prepared = state, VocabularySearch(vocabulary.detach())
        return self.prepared

    def forward(self, states: Tensor, vocabulary: Tensor) -> Tensor:
        return self.search(vocabulary)(states)

    def streamed(self, vocabulary: Tensor) -> Tensor:
        return vocabulary[: len(vocabulary) // 4] if self.search(vocabulary).searches else vocabulary


def replace_search(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Autoencoder) and type(module.nearest) is NearestTokens:
            module.nearest = Int8NearestTokens()


class VocabularySearch:
    """The search for one matrix of token vectors (V, d), which must not change."""

    def __init__(self, vocabulary: Tensor):
        self.vocabulary = vocabulary
        self.multiplied = self.asked = 0  # products in fp32, and products in all, so far
        self.searches = len(vocabulary) > MIN_VOCABULARY and vocabulary.device.type == "cpu" and self._quantize()

    @torch.no_grad()
    def _quantize(self) -> bool:
        """Quantize the vocabulary; returns whether this processor's integer product is exact."""
        count, size = self.vocabulary.shape
        places = torch.arange(-(-count // PAGE) * PAGE).clamp(max=count - 1)  # the last token fills the last page
        whole, scales = torch.zeros(len(places), size + len(RANGE), dtype=torch.int8), torch.empty(len(places))
        lengths, offs = torch.empty(len(places)), torch.empty(len(places))
        for here in torch.arange(len(places)).split(
            PAGE * STATES_AT_ONCE
        ):  # a second copy in fp32 would be a large one
            vectors = self.vocabulary[places[here]].float()
            scales[here] = vectors.abs().amax(1).clamp(min=TINY) / WEIGHT_LEVELS
            rounded = (vectors / scales[here, None]).round()
            whole[here, :size] = rounded.to(torch.int8)
            rounded *= scales[here, None]
            lengths[here], offs[here] = rounded.norm(dim=1), (vectors - rounded).norm(dim=1)
        self.packed = _packed(whole, scales)
        self.lengths = _by_page(lengths)
        self.offs = _by_page(offs) + ROUNDING * self.lengths
        return bool(self.offs.isfinite().all()) and self._is_exact(whole[:PAGE, :size], scales[:PAGE])

    def _is_exact(self, vectors: Tensor, scales: Tensor) -> bool:
        """Whether products of some states with the first page agree with integer arithmetic."""
        levels = torch.arange(-STATE_LEVELS, STATE_LEVELS + 1.0)
        states = levels[torch.arange(2 * vectors.shape[1]) * 7 % len(levels)].view(2, -1)
        expected = (states.double() @ vectors.double().T) * scales
        error = (self._products(states)[:, 0] - expected).abs()
        return bool((error <= ROUNDING * states.norm(dim=1, keepdim=True) * self.lengths[0]).all())

    def _products(self, states: Tensor) -> Tensor:
        """ŵ·ĝ of all tokens and integer states (n, d): (n, pages, PAGE)."""
        limits = states.new_tensor(RANGE).expand(len(states), -1)
        output = torch.ops.quantized.linear_dynamic(torch.cat([states, limits], dim=1), self.packed, True)
        return output.unflatten(1, (-1, PAGE))

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Tensor:
        """(n, d) → (n,)."""
        if not self.searches or not len(states):
            return most_probable_tokens(states, self.vocabulary, PROJECT)
        return torch.cat([self._search(part) for part in states.split(STATES_AT_ONCE)])

    def _search(self, states: Tensor) -> Tensor:
        states = states.float()
        scaled = states * (STATE_LEVELS / states.abs().amax(1, keepdim=True).clamp(min=TINY))
        rounded = scaled.round()
        products = self._products(rounded)
        length = scaled.norm(dim=1, keepdim=True)
        off = length * self.offs + (scaled - rounded).norm(dim=1, keepdim=True) * self.lengths
        largest = products.amax(2)  # (n, pages)
        page = (largest - off).argmax(1)
        token = self._token(page, products[torch.arange(len(states)), page].argmax(1))
        lower = (scaled * self.vocabulary[token].float()).sum(
            1, keepdim=True
        ) - 2 * ROUNDING * length * self.lengths.amax()
        least = lower - off  # a token with a smaller product is not the best
        row, page = (largest >= least).nonzero(as_tuple=True)
        place, token = (products[row, page] >= least[row, page][:, None]).nonzero(as_tuple=True)
        self.multiplied += len(token)
        self.asked += len(states) * len(self.vocabulary)
        if len(token) > MAX_CANDIDATES:  # as if all tokens have the same vector
            return most_probable_tokens(states, self.vocabulary, PROJECT)
        row, token = row[place], self._token(page[place], token)
        return _best(row, token, (states[row] * self.vocabulary[token].float()).sum(1), len(states))

    def _token(self, page: Tensor, place: Tensor) -> Tensor:
        """Tokens at some places of pages; the last page is filled with the last token."""
        return (PAGE * page + place).clamp_(max=len(self.vocabulary) - 1)


def _packed(whole: Tensor, scales: Tensor) -> Any:
    """Integer matrices (m, d) and the scales of their rows, as the library multiplies them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that another package will take over
        zeros = torch.zeros(len(scales), dtype=torch.long)
        matrix = torch._make_per_channel_quantized_tensor(  # pyright: ignore[reportPrivateImportUsage]
            whole, scales.double(), zeros, 0
        )
    return torch.ops.quantized.linear_prepack(matrix, None)


def _by_page(values: Tensor) -> Tensor:
    """Maximum of each page: (pages,)."""
    return values.unflatten(0, (-1, PAGE)).amax(1)


def _best(rows: Tensor, tokens: Tensor, values: Tensor, count: int) -> Tensor:
    """For each row the token with the largest value; of several, the first: (count,)."""
    best = values.new_full((count,), -torch.inf).scatter_reduce(0, rows, values, "amax")
    won = values == best[rows]
    return tokens.new_zeros(count).scatter_reduce(0, rows[won], tokens[won], "amin", include_self=False)
