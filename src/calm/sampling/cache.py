"""Keys and values of texts that grow, with room behind them: a step writes its own and copies none of the others."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor

ROOM = 32  # places at least; beyond that a quarter of what is there


class Cache(Protocol):
    """What a batch asks of the cache of a backbone, ours or transformers'."""

    @property
    def layers(self) -> Sequence[Any]: ...  # each with `keys` and `values` (B, heads, L, d)

    def get_seq_length(self) -> int: ...

    def batch_select_indices(self, indices: Tensor) -> None: ...


class Room:
    """Memory whose front is handed out; it grows when it is full."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.front: Tensor | None = None

    def behind(self, states: Tensor | None, new: Tensor) -> Tensor:
        """states (B, heads, L, d), or none, with new ones behind them. What is not the last front is copied first."""
        front = self.reserve(states, new.shape[-2], new)
        front[..., front.shape[-2] - new.shape[-2] :, :] = new
        return front

    def reserve(self, states: Tensor | None, count: int, like: Tensor) -> Tensor:
        """The same with places behind them that hold nothing yet."""
        before = states.shape[-2] if states is not None and states.numel() else 0
        after = before + count
        if self.whole is None or states is not self.front or self.whole.shape[-2] < after:
            self.whole = like.new_empty(*like.shape[:-2], after + max(ROOM, after // 4), like.shape[-1])
            if states is not None and before:
                self.whole[..., :before, :] = states
        self.front = self.whole[..., :after, :]
        return self.front


class RoomyLayer:
    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.room = Room(), Room()

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = self.room[0].behind(self.keys, keys)
        self.values = self.room[1].behind(self.values, values)
        return self.keys, self.values

    def reserve(self) -> tuple[Tensor, Tensor]:
        """Keys and values of texts that are there, with a place behind them for whoever writes it."""
        self.keys = self.room[0].reserve(self.keys, 1, self.keys)
        self.values = self.room[1].reserve(self.values, 1, self.values)
        return self.keys, self.values


class RoomyCache:
    def __init__(self, num_layers: int):
        self.layers = [RoomyLayer() for _ in range(num_layers)]

    def get_seq_length(self) -> int:
        first = self.layers[0].keys
        return 0 if first is None else first.shape[-2]

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[indices], layer.values[indices]


def transformers_cache() -> Cache:
    """The same for a backbone that transformers runs."""
    from transformers import cache_utils

    return cache_utils.Cache(layer_class_to_replicate=_library_layer())


@lru_cache
def _library_layer() -> Any:
    """A layer that transformers' caches know; made once, when the library is imported anyway."""
    from transformers.cache_utils import DynamicLayer

    class Layer(RoomyLayer, DynamicLayer):
        def __init__(self, *args: Any, **kwargs: Any):
            DynamicLayer.__init__(self, *args, **kwargs)
            RoomyLayer.__init__(self)

        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            return super().update(keys, values)

    return Layer
