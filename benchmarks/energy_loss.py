"""The energy loss compared with a plain implementation: time of forward and backward pass, and peak memory.

    python benchmarks/energy_loss.py

One sequence of 2,048 chunks, Z = 128, N = 8. The plain version materializes all differences between model samples and
target samples, with the paper's M = 100. Times are medians over interleaved rounds; peak memory is measured in a new
process per version.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from calm.autoencoder import Posterior
from calm.scores.energy import energy_loss

POSITIONS, LATENT_SIZE, NUM_SAMPLES, NUM_TARGETS, ROUNDS = 2048, 128, 8, 100, 5
WARM_UP_POSITIONS = 600  # two slices of the loss
Loss = Callable[[Tensor, Posterior], Tensor]


def plain(samples: Tensor, posterior: Posterior) -> Tensor:
    """Materializes all differences (N, M, positions, Z)."""
    targets = posterior.sample(torch.randn(NUM_TARGETS, *posterior.mean.shape))
    fidelity = (samples[:, None] - targets[None]).norm(dim=-1).mean((0, 1))
    pairs = (samples[:, None] - samples[None] + 1e-12).norm(dim=-1).sum((0, 1)) / (NUM_SAMPLES * (NUM_SAMPLES - 1))
    return 2 * fidelity - pairs


def sampled(samples: Tensor, posterior: Posterior) -> Tensor:
    return energy_loss(samples, posterior, num_target_samples=NUM_TARGETS)


PLAIN = "plain, M = 100"
VERSIONS: dict[str, Loss] = {PLAIN: plain, "sliced, M = 100": sampled, "closed form": energy_loss}


def make_inputs() -> tuple[Tensor, Posterior]:
    torch.manual_seed(0)
    mean = torch.randn(POSITIONS, LATENT_SIZE)
    samples = (mean + 0.5 * torch.randn(NUM_SAMPLES, POSITIONS, LATENT_SIZE)).requires_grad_()
    return samples, Posterior(mean, torch.randn(POSITIONS, LATENT_SIZE) * 0.3 - 1.7)


def forward_backward(loss: Loss, samples: Tensor, posterior: Posterior) -> float:
    """Seconds of one forward and backward pass."""
    began = time.perf_counter()
    loss(samples, posterior).mean().backward()
    samples.grad = None
    return time.perf_counter() - began


def memory(field: str) -> float:
    """Memory of this process in MB: current (VmRSS) or peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measure_memory(name: str) -> None:
    """Print the peak memory of a version beyond its inputs, in MB; call it in a new process."""
    if name != PLAIN:  # a small case first, which initializes the libraries
        zeros = torch.zeros(WARM_UP_POSITIONS, LATENT_SIZE)
        samples = torch.randn(NUM_SAMPLES, WARM_UP_POSITIONS, LATENT_SIZE, requires_grad=True)
        forward_backward(VERSIONS[name], samples, Posterior(zeros, zeros))
    inputs = make_inputs()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = memory("VmRSS")
    forward_backward(VERSIONS[name], *inputs)
    print(memory("VmHWM") - before)


def peak_memory(name: str) -> float:
    done = subprocess.run([sys.executable, __file__, "--memory", name], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--memory", choices=list(VERSIONS), help="only print the peak memory of one version")
    args = parser.parse_args()
    if args.memory is not None:
        measure_memory(args.memory)
        return
    inputs = make_inputs()
    times: dict[str, list[float]] = {name: [] for name in VERSIONS}
    for _ in range(args.rounds):
        for name, loss in VERSIONS.items():
            times[name].append(forward_backward(loss, *inputs))
    baseline = statistics.median(times[PLAIN])
    print(f"{'version':20}{'seconds':>10}{'speedup':>10}{'peak MB':>10}")
    for name in VERSIONS:
        median = statistics.median(times[name])
        print(f"{name:20}{median:10.4f}{baseline / median:9.1f}x{peak_memory(name):10.0f}")


if __name__ == "__main__":
    main()
