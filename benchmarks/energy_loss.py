"""The energy loss against a plain implementation: time of forward and backward, and peak memory.

One sequence of 2,048 chunks, Z = 128, N = 8. The plain version holds every difference of sample and target, with the
paper's M = 100. Each measurement of memory runs in a process of its own; times are medians, compared in one run.

    python benchmarks/energy_loss.py
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from calm.models.posterior import Posterior
from calm.scores.energy import energy_loss

POSITIONS, LATENT, SAMPLES, TARGETS, ROUNDS = 2048, 128, 8, 100, 5


def plain(samples: Tensor, posterior: Posterior) -> Tensor:
    """Every difference in memory at once: (N, M, positions, Z)."""
    targets = posterior.sample(torch.randn(TARGETS, *posterior.mean.shape))
    fidelity = (samples[:, None] - targets[None]).norm(dim=-1).mean((0, 1))
    pairs = (samples[:, None] - samples[None] + 1e-12).norm(dim=-1).sum((0, 1)) / (SAMPLES * (SAMPLES - 1))
    return 2 * fidelity - pairs


def sampled(samples: Tensor, posterior: Posterior) -> Tensor:
    return energy_loss(samples, posterior, num_target_samples=TARGETS)


VERSIONS: dict[str, Callable[[Tensor, Posterior], Tensor]] = {
    "plain, M = 100": plain,
    "ours, M = 100": sampled,
    "ours, closed form": energy_loss,
}


def case() -> tuple[Tensor, Posterior]:
    torch.manual_seed(0)
    mean = torch.randn(POSITIONS, LATENT)
    samples = (mean + 0.5 * torch.randn(SAMPLES, POSITIONS, LATENT)).requires_grad_()
    return samples, Posterior(mean, torch.randn(POSITIONS, LATENT) * 0.3 - 1.7)


def step(function: Callable[[Tensor, Posterior], Tensor], samples: Tensor, posterior: Posterior) -> float:
    began = time.perf_counter()
    function(samples, posterior).mean().backward()
    samples.grad = None
    return time.perf_counter() - began


def memory(kind: str) -> float:
    """Megabytes of this process, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))


def peak_memory(name: str) -> float:
    """Megabytes beyond the inputs, in a fresh process."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    if len(sys.argv) > 1:
        if sys.argv[1] != "plain, M = 100":  # a small case of two slices loads what is lazy
            nothing = torch.zeros(600, LATENT)
            step(
                VERSIONS[sys.argv[1]],
                torch.randn(SAMPLES, 600, LATENT, requires_grad=True),
                Posterior(nothing, nothing),
            )
        inputs = case()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = memory("VmRSS")
        step(VERSIONS[sys.argv[1]], *inputs)
        print(memory("VmHWM") - before)
        return
    inputs = case()
    times: dict[str, list[float]] = {name: [] for name in VERSIONS}
    for _ in range(ROUNDS):
        for name, function in VERSIONS.items():
            times[name].append(step(function, *inputs))
    slowest = statistics.median(times["plain, M = 100"])
    print(f"{'version':20}{'seconds':>10}{'times faster':>14}{'extra MB':>10}")
    for name in VERSIONS:
        median = statistics.median(times[name])
        print(f"{name:20}{median:10.4f}{slowest / median:14.1f}{peak_memory(name):10.0f}")


if __name__ == "__main__":
    main()
