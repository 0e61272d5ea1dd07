"""The most probable word of a state, argmax over v of w_v·g, without looking at most of the vocabulary. Exact.

Words lie sorted by their length in pages. In a basis whose first k directions hold most of the states,

    w·g  =  w₁·g₁ + w₂·g₂  ≤  w₁·g₁ + |w₂|·|g₂|        (Cauchy-Schwarz; 1 the first k directions, 2 the rest)

so a product of k + 1 numbers bounds one of d. A page is looked at whole by those states alone for which its bound is
above the best word so far; long words come first, so that is soon a good one. What the bounds leave is the full
projection, page by page: no state needs another way.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from calm.models.autoencoder import ChunkAutoencoder
from calm.scores.vocabulary import most_probable_words

PAGE = 1024  # words
SHEET = 2**20  # bounds computed at once: what fits a cache
SMALL = 2**14  # a vocabulary that is as quickly read as searched
SCREENED = 4  # one direction in so many bounds the words, by default
FEW_STATES = 8  # for which all words are as quickly read as searched
ENOUGH = 2048  # states, to know their directions
MOST_STATES = 1024  # searched for at once
ROUNDING = 1e-5  # of |w|·|g|: more than what fp32 can be off


def search_of(autoencoder: ChunkAutoencoder, caution: float = 1.0) -> "VocabularySearch":
    """The search for an autoencoder's words, made once as long as they stay what they are."""
    words = autoencoder.embedding.weight
    state = (words.data_ptr(), 0 if words.is_inference() else words._version, words.dtype)
    if autoencoder not in _MADE or _MADE[autoencoder][0] != state:
        _MADE[autoencoder] = state, {}
    made = _MADE[autoencoder][1]
    if caution not in made:
        like = None
        if not _read_whole(words):
            generator = torch.Generator(words.device).manual_seed(0)
            size = (ENOUGH, autoencoder.config.latent_size)
            with torch.no_grad():
                like = autoencoder.decoder(torch.randn(size, generator=generator, device=words.device).to(words.dtype))
                like = like.flatten(0, 1)
        made[caution] = VocabularySearch(words.detach(), like, caution=caution)
    return made[caution]


_MADE: "WeakKeyDictionary[ChunkAutoencoder, tuple[tuple, dict[float, VocabularySearch]]]" = WeakKeyDictionary()


def _read_whole(words: Tensor) -> bool:
    return len(words) <= SMALL or words.device.type != "cpu"


class VocabularySearch:
    """Answers for one matrix of words (V, d), which must not change.

    The better the directions of the states are known, the closer are the bounds: it begins with those of `like` (n, d),
    or of the words, and takes those of the states themselves as soon as it has met enough of them.

    `caution` is the share of |w₂|·|g₂| that is feared: 1 is exact. Lengths that have little to do with each other are
    never that parallel, so less is faster and almost always right; docs/experiments.md has measured errors.
    """

    def __init__(
        self, words: Tensor, like: Tensor | None = None, *, directions: int | None = None, caution: float = 1.0
    ):
        self.words = words
        self.looked_at = self.asked = 0  # pages, of how many there were for the states so far
        self.full = _read_whole(words)
        if self.full:
            return
        self.kept, self.caution = directions or words.shape[1] // SCREENED, caution
        lengths = words.norm(dim=1)
        self.order = lengths.argsort(descending=True)
        self.lengths = lengths[self.order][::PAGE]  # of each page's longest word
        self.sorted = words[self.order]
        self.met: list[Tensor] | None = []  # states, until there are enough
        self._lay_out(words if like is None else like)

    def _lay_out(self, like: Tensor) -> None:
        _, basis = torch.linalg.eigh((like.T @ like).double())
        self.basis = basis.flip(1).to(self.words.dtype)  # the directions with most of the states first
        rotated = self.sorted @ self.basis
        rest = self.caution * rotated[:, self.kept :].norm(dim=1, keepdim=True)
        self.screen = torch.cat([rotated[:, : self.kept], rest], dim=1)  # (V, k + 1)

    def _meet(self, states: Tensor) -> None:
        if self.met is not None:
            self.met.append(states)
            if sum(map(len, self.met)) >= ENOUGH:
                self._lay_out(torch.cat(self.met))
                self.met = None

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Tensor:
        """(n, d) → (n,)."""
        if self.full or len(states) <= FEW_STATES:
            return most_probable_words(states, self.words)
        self._meet(states)
        if len(torch.unique(states[:, 0])) < len(states):  # some may be the same: each is answered once
            states, place = torch.unique(states, dim=0, return_inverse=True)
        else:
            place = slice(None)
        return torch.cat([self._search(part) for part in states.split(MOST_STATES)])[place]

    def _search(self, states: Tensor) -> Tensor:
        rotated = states @ self.basis
        rest = rotated[:, self.kept :].norm(dim=1, keepdim=True)
        screened = torch.cat([rotated[:, : self.kept], rest], dim=1)  # (n, k + 1)
        length = states.norm(dim=1)
        best = torch.full_like(length, -torch.inf)
        found = torch.zeros(len(states), dtype=torch.long)
        pages = max(1, SHEET // PAGE // len(states))
        for first in range(0, len(self.lengths), pages):
            bounds = self._bounds(first, first + pages, screened, length, best)  # (pages, n)
            for page, bound in enumerate(bounds, start=first):
                hopeful = (bound > best).nonzero()[:, 0]
                if not len(hopeful):
                    continue
                self.looked_at += len(hopeful)
                value, place = (self.sorted[page * PAGE : (page + 1) * PAGE] @ states[hopeful].T).max(0)
                better = value > best[hopeful]
                hopeful = hopeful[better]
                best[hopeful], found[hopeful] = value[better], place[better] + page * PAGE
        self.asked += len(states) * len(self.lengths)
        return self.order[found]

    def _bounds(self, first: int, last: int, screened: Tensor, length: Tensor, best: Tensor) -> Tensor:
        """The most that a word on these pages can be worth to each state; -inf where its length alone rules it out."""
        longest = self.lengths[first:last]
        bounds = torch.full((len(longest), len(length)), -torch.inf, dtype=length.dtype)
        hopeful = (longest[0] * length * (1 + ROUNDING) > best).nonzero()[:, 0]
        if len(hopeful):
            products = self.screen[first * PAGE : last * PAGE] @ screened[hopeful].T  # (words, n)
            whole = len(products) // PAGE
            bounds[:whole, hopeful] = products[: whole * PAGE].unflatten(0, (whole, PAGE)).amax(1)
            if whole < len(longest):
                bounds[whole, hopeful] = products[whole * PAGE :].amax(0)
        return bounds + ROUNDING * longest[:, None] * length
