"""Continuations of every position of some texts at once, on one shared cache.

The texts are read once. A branch hangs on a position of a text, or on another branch: it attends to what that has seen,
and to itself. All branches of a generation are computed in one forward pass; the mask says who sees whom.

    text           s0 ── s1 ── s2 ── s3       columns 0 … 3 of the cache
                    │           │
    generation 1   a0          a2             columns 4, 5:  a2 sees s0, s1, s2 and a2
                                │
    generation 2               b2             column 6:      b2 sees s0, s1, s2, a2 and b2

Only branches that can still count go on, so most generations are small.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from calm.errors import UserError
from calm.noise import RowNoise

SAME = 1e-3  # of the largest state: how closely a branch must agree with a text that is read anew


class Branches:
    """Nodes of a generation are numbered text by text; `plant` chooses those of the first."""

    def __init__(self, forward: Callable[..., Tensor]):
        """`forward(inputs, past_key_values, attention_mask, position_ids)` → states or logits (B, columns, H)."""
        self.forward, self.cache = forward, DynamicCache()

    def read(self, inputs: Tensor) -> Tensor:
        """Read the texts: (B, L, ...) → states of their positions (B, L, H)."""
        self.texts, self.length = inputs.shape[:2]
        self.columns = self.length
        states = self.forward(inputs, past_key_values=self.cache, attention_mask=None, position_ids=None)
        self.dtype = states.dtype
        return states

    def plant(self, first: int, last: int) -> None:
        """Begin with the positions from `first` to before `last` of every text; what grew before is forgotten."""
        if self.columns > self.length:
            self.cache.crop(self.length - self.columns)
        device, self.columns = self.cache.layers[0].keys.device, self.length  # pyright: ignore
        place = torch.arange(first, last, device=device)
        self.counts = [last - first] * self.texts  # nodes of each text
        self.row = torch.arange(self.texts, device=device).repeat_interleave(last - first)  # (A,), A nodes in all
        self.position = place.repeat(self.texts)
        self.seen = (torch.arange(self.length, device=device) <= place[:, None]).repeat(self.texts, 1)  # (A, columns)

    def grow(self, parents: Tensor, inputs: Tensor) -> Tensor:
        """The next generation: parents (A,), in order, and what is read behind them (A, ...) → states (A, H)."""
        self.row = self.row[parents]
        self.position = self.position[parents] + 1
        self.counts = self.row.bincount(minlength=self.texts).tolist()
        seen = self._padded(self.seen[parents])  # (B, M, columns), M the most branches of a text
        itself = torch.eye(seen.shape[1], dtype=torch.bool, device=seen.device).expand(self.texts, -1, -1)
        seen = torch.cat([seen, itself], dim=-1)
        self.columns = seen.shape[-1]
        lowest = torch.finfo(self.dtype).min  # added to scores: every kind of attention understands it
        states = self.forward(
            self._padded(inputs),
            past_key_values=self.cache,
            attention_mask=torch.zeros_like(seen, dtype=self.dtype).masked_fill(~seen, lowest)[:, None],
            position_ids=self._padded(self.position),
        )
        real = self._padded(torch.ones_like(self.row, dtype=torch.bool))  # (B, M)
        self.seen = seen[real]
        return states[real]

    def _padded(self, values: Tensor) -> Tensor:
        return pad_sequence(list(values.split(self.counts)), batch_first=True)


def check_branches(forward: Callable[..., Tensor], inputs: Tensor) -> None:
    """Raise where a model cannot be continued in branches: it has a memory of its own, or counts columns of the cache.

    Of `inputs` (1, 6, ...) four are read; two branches are compared with texts that are read anew.
    """
    try:
        branches = Branches(forward)
        branches.read(inputs[:, :4])
        branches.plant(0, 4)
        grown = branches.grow(torch.tensor([1, 3], device=inputs.device), inputs[0, [4, 4]])
        grown = branches.grow(torch.tensor([0, 1], device=inputs.device), inputs[0, [5, 5]])
        for state, places in zip(grown, ([0, 1, 4, 5], [0, 1, 2, 3, 4, 5]), strict=True):
            anew = Branches(forward).read(inputs[:, places])[0, -1]
            if not torch.allclose(state, anew, rtol=0, atol=SAME * float(anew.abs().max())):
                raise ValueError("continued in branches it gives other states")
    except Exception as error:  # an architecture without such a cache fails in its own way
        raise UserError(f"models of this kind cannot be scored at K < 4 or with a softmax: {error}") from error


class BranchNoise(RowNoise):
    """Noise for the nodes of a generation: each text draws for its own from its own generator."""

    def __init__(self, noise: RowNoise, counts: list[int]):
        self.generators, self.counts = noise.generators, counts

    def draw(self, function, shape: tuple[int, ...]) -> Tensor:
        parts = zip(self.generators, self.counts, strict=True)
        return torch.cat([function((count, *shape), generator=g, device=g.device) for g, count in parts])
