"""Scaling: how the time of a training step grows with every size, with processes, and, by formula, with GPUs."""

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
from calm.train.distributed import shard
from calm.train.stages import described_model

BASE = ("data.sequence_length=128", "data.batch_size=4", "autoencoder.latent_size=64")
WORDS = 4096
GROWING = {  # setting → values; the first is what the others are compared with
    "chunk size K": ("data.chunk_size", (1, 2, 4, 8)),
    "model samples N": ("language_model.num_model_samples", (2, 4, 8, 16)),
    "vocabulary V": ("", (4096, 16384, 65536)),
    "latent size Z": ("autoencoder.latent_size", (16, 64, 256)),
    "context in tokens": ("data.sequence_length", (128, 256, 512, 1024)),
    "batch": ("data.batch_size", (2, 4, 8, 16)),
}
GPU_FLOPS, GPU_SHARE, LINK = 989e12, 0.4, 50e9  # an H100's bf16 peak, the share a step reaches, bytes/s between GPUs
GPUS = (8, 32, 128, 512)


def measure(size: str, rounds: int, machine: Machine) -> Iterator[Row]:
    for name, (field, values) in GROWING.items():
        settings = [[f"{field}={value}"] if field else [] for value in values]
        words = [WORDS if field else value for value in values]
        steps = {
            f"{value}": Training(config_of("laptop-calm", "laptop", *BASE, *changed), vocabulary)
            for value, changed, vocabulary in zip(values, settings, words, strict=True)
        }
        times = take_turns({value: training.step for value, training in steps.items()}, rounds)
        first = next(iter(times.values()))
        for value, seconds in times.items():
            yield row(f"{name} = {value}: times a step of the first", ratios(seconds, first), "")
    yield from _processes(rounds)
    yield from estimates("paper-calm-xl")


def _processes(rounds: int) -> Iterator[Row]:
    """Weak scaling: each process has one thread and a batch of its own.

    Two that have nothing to do with each other, each with all parameters, tell what sharing the machine costs.
    """
    alone, apart, together = (sorted(_step_times(*kind, rounds)) for kind in ((1, False), (2, False), (2, True)))
    yield row("one process: a step", [1e3 * seconds for seconds in alone], "ms")
    yield row("two processes, each by itself: a step", [1e3 * seconds for seconds in apart], "ms")
    yield row("two processes, twice the batch: a step", [1e3 * seconds for seconds in together], "ms")
    yield row("two processes: efficiency", ratios(alone, together), "")
    for name, less, more in (("the machine that two share", alone, apart), ("collectives", apart, together)):
        yield row(f"two processes: {name}, a step", [1e3 * (b - a) for a, b in zip(less, more, strict=True)], "ms")


def _step_times(processes: int, sharded: bool, rounds: int) -> list[float]:
    with TemporaryDirectory() as folder, ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        given = [(rank, processes, f"file://{Path(folder) / 'meeting'}", sharded, rounds) for rank in range(processes)]
        first, *_ = pool.map(_times, *zip(*given, strict=True))
        return first


def _times(rank: int, size: int, meeting: str, sharded: bool, rounds: int) -> list[float]:
    """Seconds of a process's steps, which begin together, its parameters sharded among all, as in training, or not."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    try:
        training = Training(config_of("laptop-calm", "laptop"), WORDS)
        if sharded:
            shard(training.model, World(rank, size, torch.device("cpu"), dist.group.WORLD))
        training.make_optimizer()
        seconds = []
        for _ in range(rounds + 1):
            dist.barrier()
            began = time.perf_counter()
            training.step()
            seconds.append(time.perf_counter() - began)
        return seconds[1:]
    finally:
        dist.destroy_process_group()


def estimates(recipe: str) -> Iterator[Row]:
    """Seconds of a step of the paper's recipe on GPUs, by formula: nobody measured this.

    Compute is what calm cost counts. Every GPU gathers all other GPUs' weights twice (forward and backward, in bf16),
    and sends its gradients on once (in fp32). What is hidden behind compute lies between all of it and nothing.
    """
    config = load_config(recipe)
    with torch.device("meta"):
        weights = sum(p.numel() for p in described_model(config, 128_257).parameters())
    tokens = config.data.batch_size * config.data.sequence_length
    for count in GPUS:
        compute = flops_of(config, tokens, 128_257) / (count * GPU_FLOPS * GPU_SHARE)
        moved = weights * (2 * 2 + 4) * (count - 1) / count / LINK
        yield Row(
            f"{recipe}, {count} GPUs, estimate: a step", compute + moved, max(compute, moved), compute + moved, "s"
        )
        yield row(f"{recipe}, {count} GPUs, estimate: efficiency", [compute / (compute + moved)], "")
