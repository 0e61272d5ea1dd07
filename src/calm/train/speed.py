"""How fast training is, and how fast the machine could be."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from calm.distributed import World
from calm.products import linear


def measured_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOP/s of a large matrix product on this machine, as training computes it: what shares of the peak are of."""
    size = 4096 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    linear(left, right)  # warms up
    best, began = 0.0, time.perf_counter()
    while best == 0.0 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        linear(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


class Speed:
    """Tokens a second and the share of the machine's peak, evaluations left out."""

    def __init__(self, tokens_per_step: int, world: World, dtype: torch.dtype):
        self.tokens_per_step, self.world = tokens_per_step, world
        self.peak = measured_peak(world.device, dtype) * world.size
        self.flops, self.step, self.began = 0.0, -1, 0.0
        self.last: dict[str, float] = {}

    def count_flops(self, model: nn.Module, parts: list[dict[str, Any]], autocast: torch.autocast) -> None:
        """Count a step's FLOPs in a rehearsal: a step under the counter's eyes rounds differently from others."""
        with FlopCounterMode(display=False) as counter:
            with autocast:
                loss = model(**parts[0]).loss
            loss.backward()
        model.zero_grad()
        self.flops = counter.get_total_flops() * len(parts) * self.world.size

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.began += time.perf_counter() - began

    def since_last(self, step: int) -> dict[str, float]:
        """The speed since the last call; the first call only starts the clock."""
        now = time.perf_counter()
        if self.step >= 0:
            seconds = (now - self.began) / (step - self.step)
            self.last = {"tokens_per_second": self.tokens_per_step / seconds}
            if self.flops:
                self.last["share_of_peak"] = self.flops / seconds / self.peak
        self.step, self.began = step, now
        return self.last
