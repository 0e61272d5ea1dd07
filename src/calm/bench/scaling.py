"""Scaling benchmark: training step time by size and number of processes, and estimates for GPUs."""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from calm.bench.clock import Row, ratios, row, take_turns
from calm.bench.machine import Machine
from calm.bench.models import Training, config_of
from calm.bench.training import flops_of
from calm.config import load_config
from calm.distributed import World
from calm.paper.cost import PAPER_VOCABULARY
from calm.train.distributed import shard
from calm.train.stages import described_model

BASE = ("data.sequence_length=128", "data.batch_size=4", "autoencoder.latent_size=64")
VOCABULARY = 4096
SWEEPS = {  # name → field and values; the first value is the baseline
    "chunk size K": ("data.chunk_size", (1, 2, 4, 8)),
    "model samples N": ("language_model.num_model_samples", (2, 4, 8, 16)),
    "vocabulary V": ("", (4096, 16384, 65536)),
    "latent size Z": ("autoencoder.latent_size", (16, 64, 256)),
    "context length in tokens": ("data.sequence_length", (128, 256, 512, 1024)),
    "batch size": ("data.batch_size", (2, 4, 8, 16)),
}
GPU_FLOPS, GPU_SHARE, LINK = 989e12, 0.4, 50e9  # H100 bf16 peak, assumed MFU, interconnect bytes/s
GPUS = (8, 32, 128, 512)


def measure(size: str, rounds: int, machine: Machine) -> Iterator[Row]:
    for name, (field, values) in SWEEPS.items():
        steps = {}
        for value in values:
            settings, vocabulary = ([f"{field}={value}"], VOCABULARY) if field else ([], value)
            steps[str(value)] = Training(config_of("laptop-calm", "laptop", *BASE, *settings), vocabulary).step
        times = take_turns(steps, rounds)
        for value, seconds in times.items():
            relative = ratios(seconds, times[str(values[0])])
            yield row(f"{name} = {value}: step time relative to {values[0]}", relative, "")
    yield from _processes(rounds)
    yield from estimates("paper-calm-xl")


def _processes(rounds: int) -> Iterator[Row]:
    """Weak scaling: each process has one thread and its own batch.

    Two independent, unsharded processes measure the overhead of sharing the machine.
    """
    single, independent, sharded = (sorted(_step_times(*kind, rounds)) for kind in ((1, False), (2, False), (2, True)))
    yield row("one process: time per step", [1e3 * seconds for seconds in single], "ms")
    yield row("two independent processes: time per step", [1e3 * seconds for seconds in independent], "ms")
    yield row("two sharded processes, twice the batch: time per step", [1e3 * seconds for seconds in sharded], "ms")
    yield row("two sharded processes: efficiency", ratios(single, sharded), "")
    for name, less, more in (("sharing the machine", single, independent), ("collectives", independent, sharded)):
        overheads = [1e3 * (b - a) for a, b in zip(less, more, strict=True)]
        yield row(f"two processes: overhead of {name} per step", overheads, "ms")


def _step_times(processes: int, sharded: bool, rounds: int) -> list[float]:
    with TemporaryDirectory() as folder, ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        init = f"file://{Path(folder) / 'init'}"
        arguments = [(rank, processes, init, sharded, rounds) for rank in range(processes)]
        first, *_ = pool.map(_times, *zip(*arguments, strict=True))
        return first


def _times(rank: int, world_size: int, init_method: str, sharded: bool, rounds: int) -> list[float]:
    """Seconds per step of one process, optionally sharded as in training. All processes start each step together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    try:
        training = Training(config_of("laptop-calm", "laptop"), VOCABULARY)
        if sharded:
            shard(training.model, World(rank, world_size, torch.device("cpu"), dist.group.WORLD))
        training.make_optimizer()
        seconds = []
        for _ in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            training.step()
            seconds.append(time.perf_counter() - start)
        return seconds[1:]
    finally:
        dist.destroy_process_group()


def estimates(recipe: str) -> Iterator[Row]:
    """Estimated seconds per step of a recipe on GPUs, by formula; not measured.

    Compute follows `calm cost`. Each GPU all-gathers the weights twice (forward and backward, in bf16) and
    reduce-scatters the gradients once (in fp32). Communication overlaps fully with compute in the lower bound, and not
    at all in the upper bound.
    """
    config = load_config(recipe)
    with torch.device("meta"):
        weights = sum(p.numel() for p in described_model(config, PAPER_VOCABULARY).parameters())
    tokens = config.data.batch_size * config.data.sequence_length
    flops = flops_of(config, tokens, PAPER_VOCABULARY)
    for count in GPUS:
        compute = flops / (count * GPU_FLOPS * GPU_SHARE)
        communication = weights * (2 * 2 + 4) * (count - 1) / count / LINK
        low, high = max(compute, communication), compute + communication
        yield Row(f"{recipe}, {count} GPUs: estimated time per step", high, low, high, "s")
        yield row(f"{recipe}, {count} GPUs: estimated efficiency", [compute / high], "")
