"""Key-value caches in preallocated memory.

KVCache        all rows grow together, by columns: evaluation, and generation with a mask
SlotCache      each row is the slot of a sequence with a length of its own: continuous batching
PrefillCache   writes the prompts of new sequences into their slots
"""

from typing import cast

import torch
from torch import Tensor

SPARE_POSITIONS = 32  # capacity that a cache allocates ahead, at least; beyond that a quarter of its length


class KVCache:
    """Keys and values of a batch of sequences, in preallocated memory.

    Per layer (B, heads, capacity, d), of which the first `length` positions are in use. Sequences are right-aligned:
    the last position of every row is its newest. A decoding step writes one position and copies nothing.
    """

    def __init__(self, num_layers: int):
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.length = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add positions (B, heads, L, d) to a layer; returns all of its keys and values. Layers come in order."""
        end = self.length + keys.shape[-2]
        self.reserve(layer, end, keys)
        held = []
        for memory, new in ((self.keys[layer], keys), (self.values[layer], values)):
            assert memory is not None
            memory[..., self.length : end, :] = new
            held.append(memory[..., :end, :])
        if layer == len(self.keys) - 1:
            self.length = end
        return held[0], held[1]

    def reserve(self, layer: int, length: int, like: Tensor) -> None:
        """Allocate so that a layer can hold `length` positions of tensors like (B, heads, any, d)."""
        for memories in (self.keys, self.values):
            memory = memories[layer]
            if memory is None or memory.shape[-2] < length:
                capacity = length + max(SPARE_POSITIONS, length // 4)
                larger = like.new_empty(*like.shape[:-2], capacity, like.shape[-1])
                if memory is not None and self.length:
                    larger[..., : self.length, :] = memory[..., : self.length, :]
                memories[layer] = larger

    def crop(self, length: int) -> None:
        """Keep only the first `length` positions."""
        self.length = min(self.length, length)

    def select(self, rows: Tensor) -> None:
        """Keep some rows; a row may be repeated."""
        for memories in (self.keys, self.values):
            for layer, memory in enumerate(memories):
                if memory is not None:
                    memories[layer] = memory[rows]

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """First and last place of each row that a decoding step attends to, given its mask; None: any places."""
        if mask is not None and mask.ndim != 2:
            return None
        rows = len(cast(Tensor, self.keys[0]))
        first = torch.zeros(rows, dtype=torch.long) if mask is None else (~mask.bool()).sum(1).clamp_(max=self.length)
        return first, torch.full((rows,), self.length)


class SlotCache(KVCache):
    """Keys and values of a changing batch: position p of a sequence is at place p of its slot.

    Per layer (slots, heads, capacity, d). Sequences join in free slots and leave without a copy of anything; memory
    grows only for more sequences, or longer ones, than ever before. A decoding step attends to `length` places and the
    one that it writes; a mask hides those that a shorter sequence has not reached.
    """

    def __init__(self, num_layers: int, device: torch.device):
        super().__init__(num_layers)
        self.next = torch.zeros(0, dtype=torch.long, device=device)  # (slots,): where `append` writes

    @property
    def capacity(self) -> int:
        memory = self.keys[0]
        return 0 if memory is None else memory.shape[-2]

    def allocate(self, slots: int, capacity: int, like: Tensor) -> None:
        """Allocate for tensors like (any, heads, any, d); sizes are powers of two, so that they rarely change.

        Zeros, since even what a mask hides must be finite.
        """
        before = self.keys[0]
        if before is not None:
            slots, capacity = max(slots, len(before)), max(capacity, self.capacity)
        slots, capacity = (1 << (size - 1).bit_length() for size in (slots, capacity))
        if before is not None and (slots, capacity) == (len(before), self.capacity):
            return
        for memories in (self.keys, self.values):
            for layer, memory in enumerate(memories):
                larger = memories[layer] = like.new_zeros(slots, like.shape[1], capacity, like.shape[-1])
                if memory is not None:
                    larger[: len(memory), :, : memory.shape[-2]] = memory

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the sequence of one slot to another."""
        for memory in (*self.keys, *self.values):
            assert memory is not None
            memory[target, :, :length] = memory[source, :, :length]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add a position of every slot (slots, heads, 1, d) to a layer; returns all of its keys and values."""
        rows, held = torch.arange(len(keys), device=keys.device), []
        for memory, new in ((self.keys[layer], keys), (self.values[layer], values)):
            assert memory is not None
            memory[rows, :, self.next] = new[..., 0, :]
            held.append(memory[: len(keys), :, : self.length + 1])
        return held[0], held[1]

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(self.next), self.next


class PrefillCache(KVCache):
    """Writes the keys and values of new sequences into their slots; they attend to nothing else."""

    def __init__(self, cache: SlotCache, slots: Tensor):
        super().__init__(0)
        self.cache, self.slots = cache, slots

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        for memory, new in ((self.cache.keys[layer], keys), (self.cache.values[layer], values)):
            assert memory is not None
            memory[self.slots, :, : new.shape[-2]] = new
        return keys, values
