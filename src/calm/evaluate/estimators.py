"""Accuracy P(y) and collision Σ P(x)² of the four tokens behind each chunk border of a text, for every kind of model.

An estimator has `chunk_size`, `length` (tokens that it reads at once) and `estimate(tokens, noise)`: ids
(B, length + 4) → two tensors (B, length / K, 4) for the starts K, 2K, …, length. Both are unbiased:

    CALM      accuracy: the product of the shares of samples that hit at each step, all on the true text;
              collision: of all pairs of samples, those that agree go on, each with a sample of its own
    softmax   accuracy exactly; collision: prefixes are sampled and weighted by their own probability, the last token is
              exact; all of it is exact where prefixes can be enumerated
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from calm.evaluate.branches import Branches, BranchNoise
from calm.models.calm import CalmForCausalLM
from calm.noise import RowNoise
from calm.scores.brier import LONGEST

ENUMERABLE = 512  # prefixes of three tokens that are enumerated rather than sampled
SURE_WEIGHT = 0.25  # a prefix that is at least so probable always goes on


class CalmEstimator:
    def __init__(self, model: CalmForCausalLM, length: int, num_samples: int):
        self.model, self.length, self.num_samples = model, length, num_samples
        self.chunk_size = model.config.chunk_size

    def estimate(self, tokens: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor]:
        starts = self.length // self.chunk_size
        ahead = (LONGEST - 1) // self.chunk_size  # chunks that the last start reads to the end of its four tokens
        branches = Branches(self._forward)
        text = self.model.chunks(tokens[:, : self.length + ahead * self.chunk_size])  # (B, L, K)
        samples = self._draw(branches.read(self.model.embed(text)), noise)  # (B, L, S, K)
        return self._accuracy(samples, tokens)[:, :starts], self._collision(branches, samples, noise)[:, :starts]

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
            hidden = branches.grow(parents, self._embed(chunks))
            samples = self._draw(hidden, BranchNoise(noise, branches.counts))
        return (agreeing / (count * (count - 1) / 2)).unflatten(0, where)

    def _draw(self, hidden: Tensor, noise: RowNoise) -> Tensor:
        """Chunks that follow states: (..., H) → (..., S, K)."""
        return self.model.autoencoder.tokens(self.model.head.sample(hidden, self.num_samples, noise)).movedim(0, -2)

    def _embed(self, chunks: Tensor) -> Tensor:
        return self.model.embed(chunks[None])[0]

    def _forward(self, inputs: Tensor, **kwargs) -> Tensor:
        return self.model.backbone(inputs_embeds=inputs, use_cache=True, **kwargs).last_hidden_state


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
        self.nats: Tensor | None = None  # of each next token of the last texts

    def estimate(self, tokens: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor]:
        branches = Branches(self._forward)
        logits = branches.read(tokens[:, : self.length + LONGEST - 1]).float().log_softmax(-1)  # (B, L, V)
        chosen = logits.gather(-1, tokens[:, 1 : self.length + LONGEST, None])[..., 0]
        self.nats = -chosen
        accuracy = chosen.unfold(1, LONGEST, 1).cumsum(-1).exp()  # (B, length, 4)
        return accuracy, self._collision(branches, logits, noise)[:, : self.length]

    def _collision(self, branches: Branches, logits: Tensor, noise: RowNoise) -> Tensor:
        where, vocabulary = logits.shape[:2], logits.shape[-1]
        exact = vocabulary ** (LONGEST - 1) <= ENUMERABLE
        logits = logits.flatten(0, 1)  # (A, V)
        start = torch.arange(len(logits), device=logits.device)
        weight = torch.ones(len(logits), device=logits.device)
        collision = torch.zeros(len(logits), LONGEST, device=logits.device)
        for n in range(LONGEST):
            probabilities = logits.softmax(-1)
            collision[:, n].index_add_(0, start, weight * torch.linalg.vector_norm(probabilities, dim=-1).square())
            if n == LONGEST - 1:
                break
            if exact:
                parents, tokens, weight = _every_prefix(probabilities, weight)
            else:
                copies = self.num_prefixes if n == 0 else 1
                uniform = BranchNoise(noise, branches.counts).uniform(copies, 2)
                sure = SURE_WEIGHT / self.num_prefixes
                parents, tokens, weight = _some_prefixes(probabilities, weight / copies, uniform, sure)
            if not len(parents):
                break
            start = start[parents]
            logits = branches.grow(parents, tokens).float()
        return collision.unflatten(0, where)

    def _forward(self, inputs: Tensor, **kwargs) -> Tensor:
        return self.model(input_ids=inputs, use_cache=True, **kwargs).logits


def _every_prefix(probabilities: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens behind all nodes; the weight is the probability of a prefix, squared."""
    nodes, vocabulary = probabilities.shape
    parents = torch.arange(nodes, device=weight.device).repeat_interleave(vocabulary)
    tokens = torch.arange(vocabulary, device=weight.device).repeat(nodes)
    return parents, tokens, (weight[:, None] * probabilities.square()).flatten()


def _some_prefixes(
    probabilities: Tensor, weight: Tensor, uniform: Tensor, sure: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens drawn behind each node, weighted by their probability; (A, C, 2) uniform numbers draw C of them.

    What weighs less than `sure` goes on more rarely, and weighs more if it does: the expectation stays.
    """
    tokens = _draw(probabilities, uniform[..., 0])  # (A, C)
    weight = weight[:, None] * probabilities.gather(-1, tokens)
    going_on = (weight / sure).clamp(max=1)
    parents, which = (uniform[..., 1] < going_on).nonzero(as_tuple=True)
    return parents, tokens[parents, which], (weight / going_on)[parents, which]


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Outcomes of distributions (A, V), by where uniform numbers (A, C) fall: (A, C)."""
    cumulated = probabilities.cumsum(-1)
    return torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True).clamp(max=probabilities.shape[-1] - 1)
