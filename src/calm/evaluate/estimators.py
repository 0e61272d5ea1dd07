"""Accuracy P(y) and collision Σ P(x)² of the four tokens behind each chunk border of a text, for every kind of model.

An estimator has `chunk_size`, `length` (tokens that it reads at once) and `estimate(tokens, noise)`: ids
(B, length + 4) → estimates for the starts K, 2K, …, length. Both are unbiased:

    CALM      accuracy: the product of the shares of samples that hit at each step, all on the true text;
              collision: of all pairs of samples, those that agree go on, each with a sample of its own
    softmax   accuracy exactly; collision: prefixes are sampled and weighted by their own probability, the last token is
              exact; all of it is exact where prefixes can be enumerated
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from calm.evaluate.branches import Branches, BranchNoise, check_branches
from calm.evaluate.likelihood import chunk_nats
from calm.models.calm import CalmForCausalLM
from calm.noise import RowNoise, pick
from calm.sampling.vocabulary import search_of
from calm.scores.brier import LONGEST

ENUMERABLE = 512  # prefixes of three tokens that are enumerated rather than sampled
SURE_WEIGHT = 0.25  # a prefix that is at least so probable always goes on
MOST_BRANCHES = 1024  # of a text, in one generation
MOST_PAIRS = 2**23  # of samples of a text, compared at once
MOST_DRAWS = 64  # samples of a position that are computed at once


class Estimates(NamedTuple):
    accuracy: Tensor  # (B, length / K, 4)
    collision: Tensor  # (B, length / K, 4)
    nats: Tensor | None = None  # of the tokens from the first start on: (B, length); of latents bounds


class CalmEstimator:
    def __init__(self, model: CalmForCausalLM, length: int, num_samples: int, num_latents: int = 0):
        """With `num_latents` likelihoods, too: bounds by the mixture of so many latents, of a chain its own."""
        self.model, self.length, self.num_samples, self.num_latents = model, length, num_samples, num_latents
        self.chunk_size = model.config.chunk_size

    def check(self) -> None:
        if self.chunk_size < LONGEST:
            chunks = torch.arange(6 * self.chunk_size, device=self.model.device) % self.model.config.vocab_size
            check_branches(self._forward, self.model.embed(chunks.view(1, 6, self.chunk_size)))

    def estimate(self, tokens: Tensor, noise: RowNoise) -> Estimates:
        starts = self.length // self.chunk_size
        ahead = (LONGEST - 1) // self.chunk_size  # chunks that the last start reads to the end of its four tokens
        branches = Branches(self._forward)
        text = self.model.chunks(tokens[:, : self.length + ahead * self.chunk_size])  # (B, L, K)
        hidden = branches.read(self.model.embed(text))
        samples = self._draw(hidden, noise)  # (B, L, S, K)
        parts = []
        for first, last in _slices(
            starts, min(2 * MOST_BRANCHES // self.num_samples, MOST_PAIRS // self.num_samples**2)
        ):
            branches.plant(first, last)
            parts.append(self._collision(branches, samples[:, first:last], noise))
        nats = self._nats(hidden[:, :starts], tokens, noise) if self.num_latents else None
        return Estimates(self._accuracy(samples, tokens)[:, :starts], torch.cat(parts, dim=1), nats)

    def _nats(self, hidden: Tensor, tokens: Tensor, noise: RowNoise) -> Tensor:
        """Of every token behind the first chunk: (B, length), or less where the last chunk is longer than the text."""
        behind = tokens[:, self.chunk_size : self.chunk_size + self.length]
        chunks = pad(behind, (0, self.length - behind.shape[1])).unflatten(1, (-1, self.chunk_size))
        return chunk_nats(self.model, hidden, chunks, self.num_latents, noise).flatten(1)[:, : behind.shape[1]]

    def _accuracy(self, samples: Tensor, tokens: Tensor) -> Tensor:
        length, size = samples.shape[1], self.chunk_size
        behind = tokens[:, size : (length + 1) * size]
        behind = pad(behind, (0, length * size - behind.shape[1]), value=-1)  # the end of the last chunk is not wanted
        true = behind.unflatten(1, (length, 1, size))
        hits = (samples == true).cumprod(-1).float().mean(2)  # (B, L, K): of the first 1 … K tokens of a chunk
        grams, before = [], torch.ones_like(hits[..., 0])
        while len(grams) < LONGEST:
            grams += [before * hits[..., k] for k in range(size)]
            before = before * hits[..., -1]
            hits = pad(hits[:, 1:], (0, 0, 0, 1))  # those of the next chunk
        return torch.stack(grams[:LONGEST], dim=-1)

    def _collision(self, branches: Branches, samples: Tensor, noise: RowNoise) -> Tensor:
        """Pairs of samples that agree, counted where they began; samples that agree share a branch."""
        where = samples.shape[:2]
        samples = samples.flatten(0, 1)  # (A, S, K): nodes, samples at each
        count = samples.shape[1]
        start = torch.arange(len(samples), device=samples.device)
        taken = start.new_full((len(samples),), count)  # samples of a node that are somebody's
        agreeing = torch.zeros(len(samples), LONGEST, device=samples.device)
        n = 0
        while True:
            mine = torch.arange(count, device=samples.device) < taken[:, None]  # (A, S)
            same = mine[:, None] & mine[:, :, None]  # (A, S, S): pairs that agree so far
            for token in samples[..., : LONGEST - n].unbind(-1):
                same = same & (token[:, None] == token[:, :, None])
                agreeing[:, n].index_add_(0, start, same.triu(1).sum((1, 2)).float())
                n += 1
            parents, chunks, taken = _groups(same, samples)
            if n == LONGEST or not len(parents):
                break
            start = start[parents]
            hidden = branches.grow(parents, self.model.embed(chunks))
            samples = self._draw(hidden, BranchNoise(noise, branches.counts))
        return (agreeing / (count * (count - 1) / 2)).unflatten(0, where)

    def _draw(self, hidden: Tensor, noise: RowNoise) -> Tensor:
        """Chunks that follow states: (..., H) → (..., S, K)."""
        drawn = []
        for first, last in _slices(self.num_samples, MOST_DRAWS):
            drawn.append(self.model.draw(hidden, last - first, noise, search_of(self.model.autoencoder)))
        return torch.cat(drawn).movedim(0, -2)

    def _forward(self, inputs: Tensor, **kwargs) -> Tensor:
        return self.model.backbone(inputs_embeds=inputs, use_cache=True, **kwargs).last_hidden_state


def _slices(count: int, most: int) -> list[tuple[int, int]]:
    most = max(most, 1)
    return [(first, min(first + most, count)) for first in range(0, count, most)]


def _groups(same: Tensor, samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Samples of a node that are equal, two or more: the node, the chunk, and how many. `same` (A, S, S)."""
    size = same.sum(-1)
    first = ~same.tril(-1).any(-1)
    nodes, which = (first & (size > 1)).nonzero(as_tuple=True)
    return nodes, samples[nodes, which], size[nodes, which]


class SoftmaxEstimator:
    chunk_size = 1

    def __init__(self, model: PreTrainedModel, length: int, num_samples: int):
        """One sampled prefix takes the place of a pair of samples."""
        self.model, self.length, self.num_prefixes = model, length, num_samples // 2

    def check(self) -> None:
        vocabulary = self.model.config.get_text_config().vocab_size
        check_branches(self._forward, torch.arange(6, device=self.model.device)[None] % vocabulary)

    def estimate(self, tokens: Tensor, noise: RowNoise) -> Estimates:
        branches = Branches(self._forward)
        logits = branches.read(tokens[:, : self.length + LONGEST - 1]).float().log_softmax(-1)  # (B, L, V)
        chosen = logits.gather(-1, tokens[:, 1 : self.length + LONGEST, None])[..., 0]
        accuracy = chosen.unfold(1, LONGEST, 1).cumsum(-1).exp()  # (B, length, 4)
        exact = logits.shape[-1] ** (LONGEST - 1) <= ENUMERABLE
        choose = _every_prefix if exact else self._some_prefixes
        growth = logits.shape[-1] ** (LONGEST - 1) if exact else self.num_prefixes
        parts = []
        for first, last in _slices(self.length, MOST_BRANCHES // growth):
            branches.plant(first, last)
            parts.append(self._collision(branches, logits[:, first:last], choose, noise))
        return Estimates(accuracy, torch.cat(parts, dim=1), -chosen[:, : self.length])

    def _collision(self, branches: Branches, logits: Tensor, choose: Callable, noise: RowNoise) -> Tensor:
        where = logits.shape[:2]
        logits = logits.flatten(0, 1)  # (A, V)
        start = torch.arange(len(logits), device=logits.device)
        weight = torch.ones(len(logits), device=logits.device)
        collision = torch.zeros(len(logits), LONGEST, device=logits.device)
        for n in range(LONGEST):
            probabilities = logits.softmax(-1)
            collision[:, n].index_add_(0, start, weight * torch.linalg.vector_norm(probabilities, dim=-1).square())
            if n == LONGEST - 1:
                break
            parents, tokens, weight = choose(probabilities, weight, BranchNoise(noise, branches.counts), n == 0)
            if not len(parents):
                break
            start = start[parents]
            logits = branches.grow(parents, tokens).float()
        return collision.unflatten(0, where)

    def _some_prefixes(
        self, probabilities: Tensor, weight: Tensor, noise: RowNoise, first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens drawn behind each node, at the start `num_prefixes` of them, weighted by their probability.

        What weighs little goes on more rarely, and weighs more if it does: the expectation stays.
        """
        copies = self.num_prefixes if first else 1
        uniform = noise.uniform(copies, 2)  # (A, copies, 2)
        tokens = pick(probabilities, uniform[..., 0])  # (A, copies)
        weight = weight[:, None] / copies * probabilities.gather(-1, tokens)
        going_on = (weight * self.num_prefixes / SURE_WEIGHT).clamp(max=1)
        parents, which = (uniform[..., 1] < going_on).nonzero(as_tuple=True)
        return parents, tokens[parents, which], (weight / going_on)[parents, which]

    def _forward(self, inputs: Tensor, **kwargs) -> Tensor:
        return self.model(input_ids=inputs, use_cache=True, **kwargs).logits


def _every_prefix(probabilities: Tensor, weight: Tensor, *_) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens behind all nodes; the weight is the probability of a prefix, squared."""
    nodes, vocabulary = probabilities.shape
    parents = torch.arange(nodes, device=weight.device).repeat_interleave(vocabulary)
    tokens = torch.arange(vocabulary, device=weight.device).repeat(nodes)
    return parents, tokens, (weight[:, None] * probabilities.square()).flatten()
