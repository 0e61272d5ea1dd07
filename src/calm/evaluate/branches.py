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

from calm.noise import RowNoise


class Branches:
    """Nodes of a generation are numbered text by text; those of the first are the positions of the texts."""

    def __init__(self, forward: Callable[..., Tensor]):
        """`forward(inputs, past_key_values, attention_mask, position_ids)` → states or logits (B, columns, H)."""
        self.forward, self.cache = forward, DynamicCache()

    def read(self, inputs: Tensor) -> Tensor:
        """Read the texts: (B, L, ...) → states of their positions (B, L, H)."""
        rows, length = inputs.shape[:2]
        place = torch.arange(length, device=inputs.device)
        self.counts = [length] * rows  # nodes of each text
        self.row = torch.arange(rows, device=inputs.device).repeat_interleave(length)  # (A,), A nodes in all
        self.position = place.repeat(rows)
        self.seen = (place <= place[:, None]).repeat(rows, 1)  # (A, columns)
        states = self.forward(inputs, past_key_values=self.cache, attention_mask=None, position_ids=None)
        self.dtype = states.dtype
        return states

    def grow(self, parents: Tensor, inputs: Tensor) -> Tensor:
        """The next generation: parents (A,), in order, and what is read behind them (A, ...) → states (A, H)."""
        texts = len(self.counts)
        self.row = self.row[parents]
        self.position = self.position[parents] + 1
        self.counts = self.row.bincount(minlength=texts).tolist()
        seen = self._padded(self.seen[parents])  # (B, M, columns), M the most branches of a text
        itself = torch.eye(seen.shape[1], dtype=torch.bool, device=seen.device).expand(texts, -1, -1)
        seen = torch.cat([seen, itself], dim=-1)
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


class BranchNoise(RowNoise):
    """Noise for the nodes of a generation: each text draws for its own from its own generator."""

    def __init__(self, noise: RowNoise, counts: list[int]):
        self.generators, self.counts = noise.generators, counts

    def draw(self, function, shape: tuple[int, ...]) -> Tensor:
        parts = zip(self.generators, self.counts, strict=True)
        return torch.cat([function((count, *shape), generator=g, device=g.device) for g, count in parts])
