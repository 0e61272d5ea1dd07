"""A check of continuous batching for every kind of `calm.model.Batch`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def check_batch(batch: Any, hidden_of: Callable[[Tensor], Tensor], size: int, **tolerance: float) -> None:
    """Sequences that join and leave have the hidden states that they have alone: (1, L, H) → (1, L, H)."""
    generator = torch.Generator().manual_seed(0)
    sequences = {
        name: torch.randn(1, length, size, generator=generator)
        for name, length in zip("abcde", (12, 9, 7, 20, 8), strict=True)
    }
    slots: list[str | None] = []  # which sequence is in which slot
    lengths: dict[str, int] = {}

    def check(name: str, state: Tensor) -> None:
        torch.testing.assert_close(state, hidden_of(sequences[name][:, : lengths[name]])[0, -1], **tolerance)

    def add(**prompts: int) -> None:
        longest = max(prompts.values())
        rows = [torch.zeros(1, longest, size) for _ in prompts]
        for row, (name, length) in zip(rows, prompts.items(), strict=True):
            row[:, :length] = sequences[name][:, :length]
        places, states = batch.add(torch.cat(rows), list(prompts.values()), longest + 8)
        slots.extend([None] * (max(places) + 1 - len(slots)))
        lengths.update(prompts)
        for place, name, state in zip(places, prompts, states, strict=True):
            assert slots[place] is None
            slots[place] = name
            check(name, state)

    def step() -> None:
        x = torch.zeros(len(slots), size)
        for place, name in enumerate(slots):
            if name is not None:
                x[place] = sequences[name][0, lengths[name]]
                lengths[name] += 1
        for name, state in zip(slots, batch.step(x), strict=True):
            if name is not None:
                check(name, state)

    def remove(*names: str) -> None:
        kept = batch.remove([place for place, name in enumerate(slots) if name in names])
        left = [None if name in names else name for name in slots]
        slots[:] = [left[place] for place in kept]
        assert set(slots) - {None} == set(left) - {None}

    add(a=4)
    step()
    add(b=2, c=1)
    step()
    step()
    remove("b")
    step()
    add(d=11)  # longer than any before
    step()
    remove("a", "c")
    add(e=3)
    step()
    remove("e")
    step()
    remove("d")
    assert slots == []
    lengths.clear()
    add(c=2, e=5, a=1, b=3)
    step()
    remove("c", "e", "a")  # most slots are free
    step()
    assert len(slots) == 1
