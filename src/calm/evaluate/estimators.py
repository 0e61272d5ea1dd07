"""Accuracy P(y) and collision Σ P(x)² of the four tokens after each chunk boundary of a text.

An estimator has `chunk_size`, `length` (tokens that it reads at once) and `estimate(tokens, noise)`: ids
(B, length + 4) → estimates for the starts K, 2K, …, length. Both are unbiased:

    samples    any model. Accuracy: the product of the shares of samples that hit at each step, all on the true text;
               collision: of all pairs of samples, those that agree go on, each with a sample of its own
    prefixes   token probabilities, K = 1. Accuracy exactly; collision: prefixes are sampled and weighted by their own
               probability, the last token is exact; all of it is exact if prefixes can be enumerated
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from calm.evaluate.branches import Branches, BranchNoise
from calm.generate.engine import prepare_inference
from calm.heads.base import check_finite
from calm.model import LanguageModel
from calm.noise import RowNoise, pick
from calm.scores.brier import MAX_NGRAM

ENUMERABLE = 512  # prefixes of three tokens that are enumerated instead of sampled
CERTAIN_WEIGHT = 0.25  # a prefix that is at least so probable always goes on
MAX_BRANCHES = 1024  # of a text, in one generation
MAX_PAIRS = 2**23  # of samples of a text, compared at once
MAX_DRAWS = 64  # samples of a position that are computed at once


class Estimates(NamedTuple):
    accuracy: Tensor  # (B, length / K, 4)
    collision: Tensor  # (B, length / K, 4)
    nats: Tensor | None = None  # cross-entropy of the tokens from the first start on (B, length), or a bound of it


def estimator_of(
    model: LanguageModel, length: int, num_samples: int, num_latents: int = 0
) -> "SampleEstimator | PrefixEstimator":
    """The estimator that suits a model. `num_latents` is for likelihood bounds of vector heads; 0: none."""
    prepare_inference(model)  # pyright: ignore[reportArgumentType]
    if model.chunk_size == 1 and model.head.exact_likelihood:
        return PrefixEstimator(model, length, num_samples)
    return SampleEstimator(model, length, num_samples, num_latents)


class SampleEstimator:
    def __init__(self, model: LanguageModel, length: int, num_samples: int, num_latents: int = 0):
        self.model, self.length, self.num_samples, self.num_latents = model, length, num_samples, num_latents
        self.chunk_size = model.chunk_size

    def elements_per_row(self) -> int:
        """Numbers of the largest tensor per row: hidden states of samples."""
        hidden_size = self.model.config.hidden_size
        return min(self.num_samples, MAX_DRAWS) * self.length // self.chunk_size * 8 * hidden_size

    def estimate(self, tokens: Tensor, noise: RowNoise) -> Estimates:
        starts = self.length // self.chunk_size
        ahead = (MAX_NGRAM - 1) // self.chunk_size  # chunks that the last start reads to the end of its four tokens
        branches = Branches(self.model.backbone)
        text = tokens[:, : self.length + ahead * self.chunk_size].unflatten(1, (-1, self.chunk_size))  # (B, L, K)
        hidden = branches.read(self.model.embed(text))
        samples = self._draw(hidden, noise)  # (B, L, S, K)
        parts = []
        for first, last in _slices(starts, min(2 * MAX_BRANCHES // self.num_samples, MAX_PAIRS // self.num_samples**2)):
            branches.start_at(first, last)
            parts.append(self._collision(branches, samples[:, first:last], noise))
        nats = self._nats(hidden[:, :starts], tokens, noise) if self.num_latents else None
        return Estimates(self._accuracy(samples, tokens)[:, :starts], torch.cat(parts, dim=1), nats)

    def _nats(self, hidden: Tensor, tokens: Tensor, noise: RowNoise) -> Tensor:
        """Of every token after the first chunk: (B, length), or less if the last chunk is longer than the text."""
        after = tokens[:, self.chunk_size : self.chunk_size + self.length]
        chunks = pad(after, (0, self.length - after.shape[1])).unflatten(1, (-1, self.chunk_size))
        nats = self.model.head.cross_entropy(hidden, chunks, self.num_latents, noise)
        return nats.flatten(1)[:, : after.shape[1]]

    def _accuracy(self, samples: Tensor, tokens: Tensor) -> Tensor:
        length, size = samples.shape[1], self.chunk_size
        after = tokens[:, size : (length + 1) * size]
        after = pad(after, (0, length * size - after.shape[1]), value=-1)  # the end of the last chunk does not count
        true = after.unflatten(1, (length, 1, size))
        hits = (samples == true).cumprod(-1).float().mean(2)  # (B, L, K): of the first 1 … K tokens of a chunk
        grams, before = [], torch.ones_like(hits[..., 0])
        while len(grams) < MAX_NGRAM:
            grams += [before * hits[..., k] for k in range(size)]
            before = before * hits[..., -1]
            hits = pad(hits[:, 1:], (0, 0, 0, 1))  # those of the next chunk
        return torch.stack(grams[:MAX_NGRAM], dim=-1)

    def _collision(self, branches: Branches, samples: Tensor, noise: RowNoise) -> Tensor:
        """Pairs of samples that agree, counted where they began; samples that agree share a branch."""
        where = samples.shape[:2]
        samples = samples.flatten(0, 1)  # (A, S, K): nodes, samples at each
        count = samples.shape[1]
        start = torch.arange(len(samples), device=samples.device)
        taken = start.new_full((len(samples),), count)  # number of samples of each node
        agreeing = torch.zeros(len(samples), MAX_NGRAM, device=samples.device)
        n = 0
        while True:
            mine = torch.arange(count, device=samples.device) < taken[:, None]  # (A, S)
            same = mine[:, None] & mine[:, :, None]  # (A, S, S): pairs that agree so far
            for token in samples[..., : MAX_NGRAM - n].unbind(-1):
                same = same & (token[:, None] == token[:, :, None])
                agreeing[:, n].index_add_(0, start, same.triu(1).sum((1, 2)).float())
                n += 1
            parents, chunks, taken = _groups(same, samples)
            if n == MAX_NGRAM or not len(parents):
                break
            start = start[parents]
            hidden = branches.grow(parents, self.model.embed(chunks))
            samples = self._draw(hidden, BranchNoise(noise, branches.counts))
        return (agreeing / (count * (count - 1) / 2)).unflatten(0, where)

    def _draw(self, hidden: Tensor, noise: RowNoise) -> Tensor:
        """Samples of the next chunk: (..., H) → (..., S, K)."""
        drawn = [
            check_finite(self.model.head.propose(hidden, last - first, noise)).tokens()
            for first, last in _slices(self.num_samples, MAX_DRAWS)
        ]
        return torch.cat(drawn).movedim(0, -2)


def _slices(count: int, most: int) -> list[tuple[int, int]]:
    most = max(most, 1)
    return [(first, min(first + most, count)) for first in range(0, count, most)]


def _groups(same: Tensor, samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Samples of a node that are equal, two or more: the node, the chunk, and how many. `same` (A, S, S)."""
    size = same.sum(-1)
    first = ~same.tril(-1).any(-1)
    nodes, which = (first & (size > 1)).nonzero(as_tuple=True)
    return nodes, samples[nodes, which], size[nodes, which]


class PrefixEstimator:
    chunk_size = 1

    def __init__(self, model: LanguageModel, length: int, num_samples: int):
        """One sampled prefix takes the place of a pair of samples."""
        self.model, self.length, self.num_prefixes = model, length, num_samples // 2

    def elements_per_row(self) -> int:
        """Numbers of the largest tensor per row: a softmax for every position or branch."""
        return max(self.length, min(self.num_prefixes * self.length, MAX_BRANCHES)) * self.model.vocab_size

    def _log_probs(self, hidden: Tensor) -> Tensor:
        """(..., H) → (..., V)."""
        empty = torch.empty(*hidden.shape[:-1], 0, dtype=torch.long, device=hidden.device)
        return self.model.head.propose(hidden, 1).log_probs(empty)[0]

    def estimate(self, tokens: Tensor, noise: RowNoise) -> Estimates:
        branches = Branches(self.model.backbone)
        embeddings = self.model.embed(tokens[:, : self.length + MAX_NGRAM - 1, None])
        log_probs = self._log_probs(branches.read(embeddings))  # (B, L, V)
        chosen = log_probs.gather(-1, tokens[:, 1 : self.length + MAX_NGRAM, None])[..., 0]
        accuracy = chosen.unfold(1, MAX_NGRAM, 1).cumsum(-1).exp()  # (B, length, 4)
        exact = log_probs.shape[-1] ** (MAX_NGRAM - 1) <= ENUMERABLE
        choose = _every_prefix if exact else self._some_prefixes
        growth = log_probs.shape[-1] ** (MAX_NGRAM - 1) if exact else self.num_prefixes
        parts = []
        for first, last in _slices(self.length, MAX_BRANCHES // growth):
            branches.start_at(first, last)
            parts.append(self._collision(branches, log_probs[:, first:last], choose, noise))
        return Estimates(accuracy, torch.cat(parts, dim=1), -chosen[:, : self.length])

    def _collision(self, branches: Branches, logits: Tensor, choose: Callable, noise: RowNoise) -> Tensor:
        where = logits.shape[:2]
        logits = logits.flatten(0, 1)  # (A, V)
        start = torch.arange(len(logits), device=logits.device)
        weight = torch.ones(len(logits), device=logits.device)
        collision = torch.zeros(len(logits), MAX_NGRAM, device=logits.device)
        for n in range(MAX_NGRAM):
            probabilities = logits.softmax(-1)
            collision[:, n].index_add_(0, start, weight * torch.linalg.vector_norm(probabilities, dim=-1).square())
            if n == MAX_NGRAM - 1:
                break
            parents, tokens, weight = choose(probabilities, weight, BranchNoise(noise, branches.counts), n == 0)
            if not len(parents):
                break
            start = start[parents]
            logits = self._log_probs(branches.grow(parents, self.model.embed(tokens[:, None])))
        return collision.unflatten(0, where)

    def _some_prefixes(
        self, probabilities: Tensor, weight: Tensor, noise: RowNoise, first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens drawn after each node, at the start `num_prefixes` of them, weighted by their probability.

        Prefixes with small weights go on more rarely, and weigh more if they do: the expectation stays.
        """
        copies = self.num_prefixes if first else 1
        uniform = noise.uniform(copies, 2)  # (A, copies, 2)
        tokens = pick(probabilities, uniform[..., 0])  # (A, copies)
        weight = weight[:, None] / copies * probabilities.gather(-1, tokens)
        going_on = (weight * self.num_prefixes / CERTAIN_WEIGHT).clamp(max=1)
        parents, which = (uniform[..., 1] < going_on).nonzero(as_tuple=True)
        return parents, tokens[parents, which], (weight / going_on)[parents, which]


def _every_prefix(probabilities: Tensor, weight: Tensor, *_) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens after all nodes; the weight is the squared probability of a prefix."""
    nodes, vocabulary = probabilities.shape
    parents = torch.arange(nodes, device=weight.device).repeat_interleave(vocabulary)
    tokens = torch.arange(vocabulary, device=weight.device).repeat(nodes)
    return parents, tokens, (weight[:, None] * probabilities.square()).flatten()
