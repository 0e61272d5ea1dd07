"""Continuations of every position of some texts at once, on one shared cache (tree attention).

The texts are read once. A branch starts at a position of a text, or at another branch: it attends to everything its
parent attends to, and to itself. All branches of a level are computed in one forward pass with a mask.

    text           s0 ── s1 ── s2 ── s3       columns 0 … 3 of the cache
                    │           │
    level 1        a0          a2             columns 4, 5:  a2 attends to s0, s1, s2, and a2
                                │
    level 2                    b2             column 6:      b2 attends to s0, s1, s2, a2, and b2

Only branches that can still count are continued, so most levels are small.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from calm.errors import UserError
from calm.model import LanguageModel
from calm.noise import RowNoise
from calm.scores.brier import MAX_NGRAM

TOLERANCE = 1e-3  # relative to the largest state: for a branch compared with the same text read from the start


class Branches:
    """A tree of continuations. The nodes of a level are numbered text by text; `start_at` chooses those of the first.

    Args:
        backbone: see `calm.model.LanguageModel`.
    """

    def __init__(self, backbone: Any):
        self.backbone, self.cache = backbone, backbone.new_cache()

    def read(self, embeddings: Tensor) -> Tensor:
        """Read the texts: (B, L, H) → hidden states of their positions (B, L, H)."""
        self.texts, self.length = embeddings.shape[:2]
        self.device = embeddings.device
        return self.backbone(embeddings, cache=self.cache)

    def start_at(self, first: int, last: int) -> None:
        """Start from the positions `first` to before `last` of every text; earlier branches are dropped."""
        self.cache.crop(self.length)
        position = torch.arange(first, last, device=self.device)
        self.counts = [last - first] * self.texts  # nodes of each text
        self.row = torch.arange(self.texts, device=self.device).repeat_interleave(last - first)  # (A,), A nodes in all
        self.position = position.repeat(self.texts)
        columns = torch.arange(self.length, device=self.device)
        self.visible = (columns <= position[:, None]).repeat(self.texts, 1)  # (A, columns)

    def grow(self, parents: Tensor, embeddings: Tensor, count: int | None = None) -> Tensor:
        """The next level: parents (A,), in order, and what follows them (A, H) → hidden states (A, H).

        If the number of branches is given, the same for every text, a GPU is not waited for.
        """
        self.row = self.row[parents]
        self.position = self.position[parents] + 1
        self.counts = self.row.bincount(minlength=self.texts).tolist() if count is None else [count] * self.texts
        visible = self._padded(self.visible[parents])  # (B, M, columns), M the largest number of branches of a text
        itself = torch.eye(visible.shape[1], dtype=torch.bool, device=visible.device).expand(self.texts, -1, -1)
        visible = torch.cat([visible, itself], dim=-1)
        states = self.backbone(
            self._padded(embeddings), self._padded(self.position), visible[:, None], cache=self.cache
        )
        if len(set(self.counts)) == 1:  # nothing is padded
            self.visible = visible.flatten(0, 1)
            return states.flatten(0, 1)
        valid = self._padded(torch.ones_like(self.row, dtype=torch.bool))  # (B, M)
        self.visible = visible[valid]
        return states[valid]

    def _padded(self, values: Tensor) -> Tensor:
        return pad_sequence(list(values.split(self.counts)), batch_first=True)


@torch.no_grad()
def check_branches(model: LanguageModel) -> None:
    """Raise if a model with K < 4 does not support branches: it has a recurrent state, or counts the cache's columns.

    Four chunks are read and continued in two branches, which are compared with full forward passes.
    """
    if model.chunk_size >= MAX_NGRAM:  # its chunks are never continued
        return
    chunks = torch.arange(6 * model.chunk_size, device=model.device) % model.vocab_size
    embeddings = model.embed(chunks.view(1, 6, -1))
    try:
        branches = Branches(model.backbone)
        branches.read(embeddings[:, :4])
        branches.start_at(0, 4)
        branches.grow(torch.tensor([1, 3], device=embeddings.device), embeddings[0, [4, 4]])
        states = branches.grow(torch.tensor([0, 1], device=embeddings.device), embeddings[0, [5, 5]])
        for state, places in zip(states, ([0, 1, 4, 5], [0, 1, 2, 3, 4, 5]), strict=True):
            anew = Branches(model.backbone).read(embeddings[:, places])[0, -1]
            if not torch.allclose(state, anew, rtol=0, atol=TOLERANCE * float(anew.abs().max())):
                raise ValueError("its hidden states are different in branches")
    except Exception as error:  # architectures without such a cache raise errors of many types
        raise UserError(f"models of this kind cannot be scored at K < 4 or with a softmax: {error}") from error


class BranchNoise(RowNoise):
    """Noise for the nodes of a level: each text draws for its nodes from its own generator."""

    def __init__(self, noise: RowNoise, counts: list[int]):
        self.generators, self.counts = noise.generators, counts

    def draw(self, function, shape: tuple[int, ...]) -> Tensor:
        parts = zip(self.generators, self.counts, strict=True)
        return torch.cat([function((count, *shape), generator=g, device=g.device) for g, count in parts])
