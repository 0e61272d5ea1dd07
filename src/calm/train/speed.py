"""Training throughput and hardware utilization."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from calm.distributed import World


@torch.no_grad()
def measured_peak(
    device: torch.device, dtype: torch.dtype, optimize: Callable[[nn.Module], None], seconds: float = 0.3
) -> float:
    """Peak FLOP/s: the best measured throughput of a large linear layer in the precision of training.

    Args:
        optimize: replaces the layer by the one that training uses.
    """
    size = 4096 if device.type == "cuda" else 1024
    layer = nn.Sequential(nn.Linear(size, size, bias=False, device=device, dtype=dtype))
    optimize(layer)
    x = torch.randn(size, size, device=device, dtype=dtype)
    layer(x)  # warm-up
    best, start_time = 0.0, time.perf_counter()
    while best == 0.0 or time.perf_counter() - start_time < seconds:
        start = time.perf_counter()
        layer(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


ROW_INPUTS = ("chunks", "loss_mask")  # inputs of a model that have a row for each sequence

# Nominal dense peak in bf16, in FLOP/s, by whole words of the name that CUDA reports (vendors' data sheets).
NOMINAL_PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
}


def nominal_peak(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """The vendor's peak of a GPU, or None if it is not listed: bf16 (fp16 for V100), or TF32 for fp32."""
    if "Laptop" in name:  # another chip, with the name of the desktop card
        return None
    peak = next((peak for words, peak in NOMINAL_PEAKS.items() if re.search(rf"\b{words}\b", name)), None)
    if dtype != torch.float32 or peak is None:
        return peak
    return None if "V100" in name else peak / 2  # V100 has no TF32


class Speed:
    """Tokens per second, and FLOP/s relative to the peak, excluding evaluations.

    `share_of_peak` is relative to a measured matrix product; `mfu`, on GPUs, to the vendor's peak in its dtype. FLOPs
    are those of one forward and backward pass: what gradient checkpointing computes again is not counted.
    """

    def __init__(self, tokens_per_step: int, world: World, dtype: torch.dtype, peak: float):
        self.tokens_per_step, self.world = tokens_per_step, world
        self.peak = peak * world.size
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
        self.nominal_peak = (nominal_peak(name, dtype) or 0.0) * world.size
        self.flops, self.step, self.start_time = 0.0, -1, 0.0
        self.last: dict[str, float] = {}

    def count_flops(self, model: nn.Module, parts: list[dict[str, Any]], autocast: torch.autocast) -> None:
        """Count the FLOPs per step in a separate pass over one row, not compiled: counting may change rounding."""
        rows = sum(len(part["chunks"]) for part in parts)
        one = {name: value[:1] if name in ROW_INPUTS else value for name, value in parts[0].items()}
        one["noise"] = parts[0]["noise"].rows([0])
        one.pop("teacher_samples", None)  # a teacher's samples are not counted
        with FlopCounterMode(display=False) as counter, torch.compiler.set_stance("force_eager"):
            with autocast, _without_checkpointing(model):
                loss = model(**one)["loss"]
            loss.backward()
        model.zero_grad()
        self.flops = counter.get_total_flops() * rows * self.world.size

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in this context."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)  # steps that are still running are not part of it
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
            if self.flops and self.nominal_peak:
                self.last["mfu"] = self.flops / seconds / self.nominal_peak
        self.step, self.start_time = step, now
        return self.last


@contextmanager
def _without_checkpointing(model: Any) -> Iterator[None]:
    """Keep all activations, so that no FLOP is counted twice."""
    backbone: Any = getattr(model, "backbone", None) or SimpleNamespace(gradient_checkpointing=False)
    enabled, backbone.gradient_checkpointing = backbone.gradient_checkpointing, False
    yield
    backbone.gradient_checkpointing = enabled
