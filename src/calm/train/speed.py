"""Training throughput and hardware utilization."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from calm.distributed import World


def measured_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Peak FLOP/s: the best measured throughput of a large matrix multiplication in the precision of training."""
    size = 4096 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    linear(left, right)  # warm-up
    best, start_time = 0.0, time.perf_counter()
    while best == 0.0 or time.perf_counter() - start_time < seconds:
        start = time.perf_counter()
        linear(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


class Speed:
    """Tokens per second and the fraction of the measured peak FLOP/s, excluding evaluations."""

    def __init__(self, tokens_per_step: int, world: World, dtype: torch.dtype):
        self.tokens_per_step, self.world = tokens_per_step, world
        self.peak = measured_peak(world.device, dtype) * world.size
        self.flops, self.step, self.start_time = 0.0, -1, 0.0
        self.last: dict[str, float] = {}

    def count_flops(self, model: nn.Module, parts: list[dict[str, Any]], autocast: torch.autocast) -> None:
        """Count the FLOPs per step in a separate forward and backward pass, as counting may change rounding."""
        with FlopCounterMode(display=False) as counter:
            with autocast:
                loss = model(**parts[0])["loss"]
            loss.backward()
        model.zero_grad()
        self.flops = counter.get_total_flops() * len(parts) * self.world.size

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in this context."""
        start_time = time.perf_counter()
        yield
        self.start_time += time.perf_counter() - start_time

    def since_last(self, step: int) -> dict[str, float]:
        """Average throughput since the previous call. The first call only starts the timer."""
        now = time.perf_counter()
        if self.step >= 0:
            seconds = (now - self.start_time) / (step - self.step)
            self.last = {"tokens_per_second": self.tokens_per_step / seconds}
            if self.flops:
                self.last["share_of_peak"] = self.flops / seconds / self.peak
        self.step, self.start_time = step, now
        return self.last
