"""Keys and values of texts that grow, with room behind them: a step writes its own and copies none of the others."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

ROOM = 32  # places at least; beyond that a quarter of what is there


class Room:
    """Memory whose front is handed out; it grows when it is full."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.front: Tensor | None = None

    def behind(self, states: Tensor | None, new: Tensor) -> Tensor:
        """states (B, heads, L, d), or none, with new ones behind them. What is not the last front is copied first."""
        before = states.shape[-2] if states is not None and states.numel() else 0
        after = before + new.shape[-2]
        if self.whole is None or states is not self.front or self.whole.shape[-2] < after:
            self.whole = new.new_empty(*new.shape[:-2], after + max(ROOM, after // 4), new.shape[-1])
            if states is not None and before:
                self.whole[..., :before, :] = states
        self.whole[..., before:after, :] = new
        self.front = self.whole[..., :after, :]
        return self.front


class RoomyLayer(DynamicLayer):
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.room = Room(), Room()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self.room[0].behind(self.keys, key_states)
        self.values = self.room[1].behind(self.values, value_states)
        return self.keys, self.values


def roomy_cache() -> Cache:
    return Cache(layer_class_to_replicate=RoomyLayer)
