"""Several processes compute the same as one, and resume each other's checkpoints; what FSDP gathers."""

import shutil
import subprocess
import time
from collections import Counter
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from calm.config import load_config
from calm.distributed import World
from calm.noise import RowNoise
from calm.train.checkpoint import _file_numbers
from calm.train.distributed import initialize, shard
from calm.train.stages import STAGES, described_model
from tests.train.conftest import command, metrics, run


def succeed(*arguments, **kwargs):
    done = run(*arguments, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_two_processes_equal_one_and_resume_each_other(recipe, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    succeed(recipe, one)
    succeed(recipe, two, processes=2)
    alone, together = metrics(one), metrics(two)
    assert sorted(together) == list(range(1, 31))
    for step, loss in alone.items():
        assert abs(loss - together[step]) < 1e-5 * loss
    assert metrics(one, "score").keys() == metrics(two, "score").keys()
    for first, processes in ((one, 2), (two, 1)):
        # As if the run had been interrupted after step 10 or 20: the last checkpoint is gone.
        shutil.rmtree(first / "checkpoints" / "step-00000030")
        shutil.rmtree(first / "model")
        times = metrics(first, "time")
        succeed(recipe, first, "--resume", processes=processes)
        continued = metrics(first)
        for step, loss in alone.items():
            assert abs(loss - continued[step]) < 1e-5 * loss
        again = [step for step, when in metrics(first, "time").items() if when != times[step]]
        assert again == list(range(21, 31))  # resumed from step 20
        assert (first / "model" / "model.safetensors").exists()


def test_a_killed_rank_and_a_restart_with_another_number_of_processes(recipe, tmp_path):
    """SIGKILL of one rank ends the run; three processes continue from the newest checkpoint, with the same losses."""
    options = ["--set=data.batch_size=12", "--set=train.steps=40", "--set=train.checkpoint_every=10"]
    succeed(recipe, tmp_path / "whole", *options)
    arguments = command(recipe, tmp_path / "run", *options, processes=2)
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    try:
        checkpoints = tmp_path / "run" / "checkpoints"
        while process.poll() is None and not list(checkpoints.glob("step-*/checkpoint.json")):
            time.sleep(0.01)
        ranks = [p for p in psutil.Process(process.pid).children(recursive=True) if "RANK" in p.environ()]
        (last,) = (rank for rank in ranks if rank.environ()["RANK"] == "1" and "calm" in rank.cmdline())
        last.kill()
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode != 0
    succeed(recipe, tmp_path / "run", *options, "--resume", processes=3)
    whole, continued = metrics(tmp_path / "whole"), metrics(tmp_path / "run")
    assert sorted(continued) == list(range(1, 41))
    for step, loss in whole.items():
        assert abs(loss - continued[step]) < 1e-5 * loss


def test_batch_size_that_is_not_a_multiple_of_the_processes(recipe, tmp_path):
    done = run(recipe, tmp_path / "run", "--set", "data.batch_size=5", processes=2)
    assert done.returncode != 0
    assert "batch_size must be a positive multiple of the number of processes, but 5 is none of 2" in done.stderr


@pytest.mark.parametrize(
    ("fixture", "processes", "overrides", "tolerance"),
    [
        ("language_model", 3, [], 1e-5),
        ("language_model", 2, ["train.precision=bf16"], 2e-2),  # gathered in bf16, which has three digits
        ("language_model", 3, ["train.precision=bf16"], 2e-2),
        ("transformer", 2, [], 1e-5),
        ("recipe", 4, ["train.shard_size=2"], 1e-5),
    ],
    ids=["language model", "bf16", "bf16 with three", "transformer", "HSDP with 2 x 2 processes"],
)
def test_losses_do_not_depend_on_the_number_of_processes(fixture, processes, overrides, tolerance, request, tmp_path):
    recipe = request.getfixturevalue(fixture)
    options = [f"--set={override}" for override in ("data.batch_size=12", "train.steps=6", *overrides)]
    succeed(recipe, tmp_path / "one", *(option for option in options if "shard_size" not in option))
    succeed(recipe, tmp_path / "more", *options, processes=processes)
    alone, together = metrics(tmp_path / "one"), metrics(tmp_path / "more")
    assert len(alone) == 6
    for step, loss in alone.items():
        assert abs(loss - together[step]) < tolerance * abs(loss)


def test_shard_size_must_divide_the_number_of_processes(recipe, tmp_path):
    done = run(recipe, tmp_path / "run", "--set", "train.shard_size=3", processes=2)
    assert done.returncode != 0
    assert "train.shard_size must divide the number of processes, but 2 is not a multiple of 3" in done.stderr


# What FSDP gathers, with a process group that does nothing


class Gathered(TorchDispatchMode):
    """Counts the bytes that every process receives in gathering parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.bytes[args[0].dtype] += args[0].nbytes
        return func(*args, **(kwargs or {}))


@pytest.fixture
def world(request):
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield World(0, request.param, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [32], indirect=True)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_are_gathered_twice_at_most_and_the_autoencoder_never(world, precision):
    """Layers for the forward and for the backward pass, the chunk embedding and the head once."""
    model = build_on_meta("toy-calm", "language_model.head=energy")
    parts = {name: size(getattr(model, name)) for name in ("chunk_embedding", "backbone", "head")}
    found = gathered_bytes(model, world, precision)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    expected = dtype.itemsize * (parts["chunk_embedding"] + 2 * parts["backbone"] + parts["head"])
    assert set(found) == {dtype}
    assert found[dtype] == pytest.approx(expected, rel=0.05)  # shards are padded, and the root is gathered once


def build_on_meta(recipe: str, *overrides: str, vocab_size: int = 500) -> Any:
    config = load_config(recipe, list(overrides))
    with torch.device("meta"):
        return described_model(config, vocab_size)


def size(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def gathered_bytes(model: Any, world: World, precision: str) -> Counter[torch.dtype]:
    shard(model, world, precision=precision)
    initialize(model, model.reset_parameters, world.device)
    chunks = torch.randint(500, (1, 3, model.chunk_size))
    with Gathered() as gathered, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        model(chunks, noise=RowNoise([0]))["loss"].backward()
    return gathered.bytes


VOCABULARY = 128_257


@pytest.mark.parametrize(("recipe", "most"), [("paper-calm-l", 2.4e9), ("paper-calm-xl", 6.3e9)])
def test_bytes_gathered_at_the_paper_sizes(recipe, most):
    """By the rule that the test above measures; the number of processes changes it by their padding only."""
    model = build_on_meta(recipe, vocab_size=VOCABULARY)
    found = sum(2 * size(unit) * (2 if reshard else 1) for unit, reshard in model.fsdp_units())
    print(f"{recipe}: {found / 1e9:.2f} GB gathered per step in bf16")
    assert 0.9 * most < found < most


@pytest.mark.slow
@pytest.mark.parametrize("world", [32, 256], indirect=True)
def test_bytes_gathered_by_calm_l(world):
    found = gathered_bytes(build_on_meta("paper-calm-l", vocab_size=VOCABULARY), world, "bf16")
    print(f"CALM-L on {world.size} GPUs: {found[torch.bfloat16] / 1e9:.2f} GB gathered per step")
    assert 0 < found[torch.bfloat16] < 2.42e9


@pytest.mark.parametrize("world", [32, 256], indirect=True)
@pytest.mark.parametrize("recipe", ["paper-calm-l", "paper-calm-xl"])
def test_number_of_checkpoint_files_at_the_paper_sizes(world, recipe):
    """Weights and two moments in files of up to 256 MB of each process: 20,224 files by the sizes of whole tensors."""
    model = build_on_meta(recipe, vocab_size=VOCABULARY)
    shard(model, world, precision="bf16")
    model.freeze_autoencoder()
    trained = [named for named in model.named_parameters() if named[1].requires_grad]
    state = dict(model.named_parameters()) | {f"{part}.{name}": weight for part in (1, 2) for name, weight in trained}
    files = max(_file_numbers(state).values())
    print(f"{recipe} on {world.size} GPUs: {files} files per process at most")
    assert files <= 4


# Groups, precision, and memory of FSDP


class Reduced(TorchDispatchMode):
    """Notes the types of reduced gradients, and the sizes of the groups that gather parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.groups: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._reduce_scatter_base_.default:
            self.dtypes.add(args[0].dtype)
        if func is torch.ops.c10d._allgather_base_.default:
            self.groups.add(args[0].numel() // args[1].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("world", [32], indirect=True)
def test_bf16_gradients_are_reduced_in_fp32_within_a_node(world):
    model = build_on_meta("toy-calm")
    shard(model, world, shard_size=8, precision="bf16")
    initialize(model, model.reset_parameters, world.device)
    chunks = torch.randint(500, (1, 3, model.chunk_size))
    with Reduced() as reduced, torch.autocast("cpu", torch.bfloat16):
        model(chunks, noise=RowNoise([0]))["loss"].backward()
    assert reduced.dtypes == {torch.float32}
    assert reduced.groups == {8}


def test_new_models_are_on_the_meta_device_until_they_are_sharded(language_model):
    """No process holds the whole model: only the frozen autoencoder is loaded."""
    stage = STAGES["language-model"](load_config(str(language_model)), World(0, 1, torch.device("cpu")))
    assert all(parameter.is_meta for parameter in stage.model.parameters())
