"""Limits of the hardware: peak matmul throughput and memory bandwidth."""

import time
from typing import Any, NamedTuple

import torch

from calm.generate.engine import backend_description
from calm.paper.results import processor
from calm.train.loop import optimize_for_cpu
from calm.train.speed import measured_peak

LARGE = 2**28  # elements; exceeds all caches


class Machine(NamedTuple):
    peak: float  # FLOP/s of large matmuls
    bandwidth: float  # bytes/s of memory reads

    def as_json(self) -> dict[str, Any]:
        return {
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            **backend_description(),
            "matmul_flops_per_second": self.peak,
            "bytes_per_second": self.bandwidth,
        }


def measured() -> Machine:
    return Machine(measured_peak(torch.device("cpu"), torch.float32, optimize_for_cpu, 2.0), _bandwidth())


def _bandwidth(repeats: int = 7) -> float:
    """Read bandwidth in bytes/s: the best of several sums over a large tensor."""
    numbers, best = torch.ones(LARGE), 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.numel() * numbers.element_size() / (time.perf_counter() - start))
    return best
