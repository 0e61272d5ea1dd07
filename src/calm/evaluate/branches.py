"""Continuations of every position of a sequence at once, on one shared cache.

The sequence is read once. A branch hangs on a position: its states attend to the sequence up to there and to the branch
itself, and to nothing else. All branches of all positions advance together, one step a forward pass; the mask says who
sees whom.

    sequence   s0 ── s1 ── s2 ── s3          columns 0 … L-1 of the cache
                │     │     │     │
    step 1     a0    a1    a2    a3          columns L … 2L-1
    step 2     b0    b1    b2    b3          columns 2L … 3L-1:  b1 sees s0, s1, a1 and b1
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class Branches:
    """`copies` branches at each of `length` positions; branch number c·length + i hangs on position i."""

    def __init__(self, forward: Callable[..., Tensor], config: Any, length: int, copies: int):
        """`forward(inputs, past_key_values, attention_mask, position_ids)` → states, (B, columns, H) or logits."""
        self.forward, self.length, self.copies = forward, length, copies
        self.cache = DynamicCache(config=config)
        self.steps = 0

    def read(self, inputs: Tensor) -> Tensor:
        """Read the sequence itself: (B, L, ...) → states of its positions."""
        return self.forward(inputs, past_key_values=self.cache, attention_mask=None, position_ids=None)

    def advance(self, inputs: Tensor) -> Tensor:
        """One more step of every branch: (B, copies·L, ...) → states of the branches."""
        self.steps += 1
        count, device = self.copies * self.length, inputs.device
        position = torch.arange(self.length, device=device).repeat(self.copies)  # that each branch hangs on
        sequence = torch.arange(self.length, device=device) <= position[:, None]  # (branches, L)
        own = torch.eye(count, dtype=torch.bool, device=device).repeat(1, self.steps)  # itself, now and before
        mask = torch.cat([sequence, own], dim=1)[None, None].expand(len(inputs), -1, -1, -1)
        positions = (position + self.steps).expand(len(inputs), -1)
        return self.forward(inputs, past_key_values=self.cache, attention_mask=mask, position_ids=positions)
