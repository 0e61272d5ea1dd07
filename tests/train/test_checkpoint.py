"""Training checkpoints: staged in CPU memory, few files, and no harm from a full disk or a kill."""

import json
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from calm.distributed import World
from calm.errors import UserError
from calm.train import checkpoint as module
from calm.train.checkpoint import Checkpoints, damage, load

ONE_PROCESS = World(0, 1, torch.device("cpu"))


def make_checkpoints(directory, keep=2) -> tuple[Checkpoints, list[str]]:
    warnings: list[str] = []
    return Checkpoints(directory, keep, ONE_PROCESS, {}, warnings.append), warnings


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class GPUTensor(torch.Tensor):
    """Reports cuda:0, and may only be used by the main thread, whose current device and stream are right."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device="cuda:0")

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert threading.current_thread() is threading.main_thread(), f"{func} in the writing thread"
        inner = func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        return inner if func is torch.ops.aten._to_copy.default else cls(inner)


def test_the_writing_thread_gets_copies_in_cpu_memory(tmp_path):
    checkpoints, warnings = make_checkpoints(tmp_path)
    on_gpu, on_cpu = torch.arange(6.0), torch.ones(3)
    checkpoints.save(10, {"gpu": GPUTensor(on_gpu), "cpu": on_cpu})
    on_gpu.zero_()  # training goes on
    on_cpu.zero_()
    assert checkpoints.wait(), warnings
    (file,) = (tmp_path / "step-00000010").glob("*.safetensors")
    saved = load_file(file)
    assert saved["gpu"].tolist() == [0, 1, 2, 3, 4, 5]
    assert saved["cpu"].tolist() == [1, 1, 1]


@pytest.fixture
def fake_process_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=256)
    yield
    dist.destroy_process_group()


def test_files_are_filled_by_what_one_process_holds(fake_process_group, monkeypatch):
    """Eight tensors of 1 MB over 256 processes are 4 KB each, so that one file of 64 KB holds all of them."""
    monkeypatch.setattr(module, "LARGEST_FILE", 2**16)
    mesh = init_device_mesh("cpu", (256,))
    sharded = {str(n): DTensor.from_local(torch.zeros(1, 2**10), mesh, [Shard(0)]) for n in range(8)}
    assert set(module._file_numbers(sharded).values()) == {1}
    whole = {name: torch.zeros(256, 2**10) for name in sharded}
    assert sorted(module._file_numbers(whole).values()) == list(range(1, 9))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs permission to mount a tmpfs")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_process_that_cannot_write_does_not_leave_the_others_waiting(tmp_path, monkeypatch):
    """All processes learn of the error: the failing one takes part in the exchange, and the others fail as well."""
    world = World(0, 2, torch.device("cpu"))
    checkpoints = Checkpoints(tmp_path, 2, world, {}, lambda _: None)
    (tmp_path / "shard-00001-model.safetensors").write_bytes(b"weights")
    others: list = [{"shard-00002-model.safetensors": "a"}, OSError("no space left")]

    def exchange(parts, own, group):
        parts[:] = [own, others.pop()]

    monkeypatch.setattr(dist, "all_gather_object", exchange)
    with pytest.raises(OSError, match="no space left"):
        checkpoints._checksums(tmp_path)
    monkeypatch.setattr(module, "sync", lambda path: (_ for _ in ()).throw(OSError("quota exceeded")))
    with pytest.raises(OSError, match="quota exceeded"):
        checkpoints._checksums(tmp_path)
    assert not others


def test_a_full_disk_keeps_earlier_checkpoints(small_disk):
    checkpoints, warnings = make_checkpoints(small_disk / "checkpoints")
    small, large = {"w": torch.ones(1000)}, {"w": torch.ones(100_000)}
    checkpoints.save(10, small)
    assert checkpoints.wait()
    checkpoints.save(20, large)
    assert not checkpoints.wait()
    (warning,) = warnings
    assert warning.startswith("a checkpoint could not be written (step 20: ")
    assert "No space left on device" in warning
    assert names(small_disk / "checkpoints") == ["step-00000010"]
    checkpoints.save(30, small)
    assert checkpoints.wait()
    assert damage(small_disk / "checkpoints" / "step-00000030") is None


KILLED = """
import os, pathlib, shutil, signal, sys
import torch
from calm.distributed import World
from calm.errors import UserError
from calm.train import checkpoint as module

original = shutil.rmtree
def half(path, **options):
    if not pathlib.Path(path).exists():
        return original(path, **options)
    (pathlib.Path(path) / "checkpoint.json").unlink()
    os.kill(os.getpid(), signal.SIGKILL)

checkpoints = module.Checkpoints(pathlib.Path(sys.argv[1]), 1, World(0, 1, torch.device("cpu")), {}, print)
for step in (1, 2):
    if step == 2:
        module.shutil.rmtree = half
    checkpoints.save(step, {"w": torch.full((4,), float(step))}, score=float(step))
    checkpoints.wait()
"""


def test_a_kill_while_old_checkpoints_are_deleted(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert names(tmp_path) == ["step-00000001.deleting", "step-00000002"]
    checkpoints, warnings = make_checkpoints(tmp_path, keep=1)
    newest = checkpoints.newest()
    assert newest is not None
    state = {"w": torch.zeros(4)}
    load(newest[0], state, ONE_PROCESS)
    assert state["w"].tolist() == [2, 2, 2, 2]
    checkpoints.save(3, state, score=3.0)
    assert checkpoints.wait()
    assert names(tmp_path) == ["step-00000003"]
    assert warnings == []


@pytest.mark.parametrize("record", [None, "{", "[]", json.dumps({"score": "best"})])
def test_directories_without_a_valid_record_are_pruned(tmp_path, record):
    """As a kill during deletion left them in version 0.1."""
    (tmp_path / "step-00000001").mkdir()
    if record is not None:
        (tmp_path / "step-00000001" / "checkpoint.json").write_text(record)
    checkpoints, warnings = make_checkpoints(tmp_path, keep=1)
    checkpoints.save(2, {"w": torch.ones(4)}, score=1.0)
    assert checkpoints.wait(), warnings
    assert names(tmp_path) == ["step-00000002"]


def save_steps(directory, steps=(10, 20)) -> None:
    checkpoints, _ = make_checkpoints(directory)
    for step in steps:
        checkpoints.save(step, {"w": torch.full((4,), float(step))}, score=1.5, skipped=[3, 0])
        assert checkpoints.wait()
    checkpoints.close()


def change_record(path, **changes) -> None:
    """Write other values into the record, or remove those that are None; its checksum stays."""
    file = path / "checkpoint.json"
    record = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in record.items() if value is not None}))


def change_digit(path) -> None:
    file = path / "checkpoint.json"
    file.write_text(file.read_text().replace('"score": 1.5', '"score": 1.6'))


def add_shard(path) -> None:
    save_file({"w": torch.zeros(4)}, path / "shard-00000-model.safetensors")


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (change_digit, "checkpoint.json: checksum mismatch"),
        (lambda path: change_record(path, step=10, sha256=None), "checkpoint.json: its step is 10"),
        (lambda path: change_record(path, step="20", sha256=None), "checkpoint.json: its step is '20'"),
        (lambda path: change_record(path, files=None, sha256=None), "checkpoint.json: it lists no files"),
        (lambda path: change_record(path, files=[1], sha256=None), "checkpoint.json: it lists no files"),
        (lambda path: change_record(path, skipped=None, sha256=None), "checkpoint.json: its skipped steps are None"),
        (lambda path: change_record(path, sha256=5), "checkpoint.json: checksum mismatch"),
        (lambda path: (path / "checkpoint.json").write_text("[]"), "checkpoint.json: not an object"),
        (lambda path: (path / "checkpoint.json").write_text("[" * 100_000), "maximum recursion depth exceeded"),
        (lambda path: (path / "checkpoint.json").write_bytes(b"\xff"), "can't decode byte"),
        (add_shard, "shard-00000-model.safetensors is not listed in checkpoint.json"),
    ],
)
def test_damaged_records_and_unlisted_files(tmp_path, broken, problem):
    """The checkpoint before it is used, also if the same step was damaged before."""
    save_steps(tmp_path)
    (tmp_path / "step-00000020.damaged").mkdir()
    (tmp_path / "step-00000020.damaged" / "file").write_text("of the first time")
    broken(tmp_path / "step-00000020")
    checkpoints, warnings = make_checkpoints(tmp_path)
    newest = checkpoints.newest()
    assert newest is not None
    path, record = newest
    assert (path.name, record["step"], record["skipped"]) == ("step-00000010", 10, [3, 0])
    (warning,) = warnings
    assert problem in warning
    assert names(tmp_path) == ["step-00000010", "step-00000020.damaged", "step-00000020.damaged-2"]


def test_no_valid_checkpoint_is_an_error(tmp_path):
    save_steps(tmp_path)
    for path in tmp_path.iterdir():
        change_digit(path)
    checkpoints, warnings = make_checkpoints(tmp_path)
    with pytest.raises(UserError, match="all checkpoints in .* are damaged, .*; restore one of them"):
        checkpoints.newest()
    assert len(warnings) == 2
    assert checkpoints.newest() is None  # the next run starts from step 0
    assert names(tmp_path) == ["step-00000010.damaged", "step-00000020.damaged"]


def test_a_checkpoint_of_another_model_is_one_error(tmp_path):
    save_steps(tmp_path)
    for state in ({"w": torch.zeros(5)}, {"v": torch.zeros(4)}):
        with pytest.raises(UserError, match="step-00000020 does not fit the model"):
            load(tmp_path / "step-00000020", state, ONE_PROCESS)


def test_directories_of_others_are_no_checkpoints(tmp_path):
    (tmp_path / "step-original").mkdir()
    (tmp_path / "step-original" / "notes").write_text("mine")
    checkpoints, _ = make_checkpoints(tmp_path, keep=1)
    assert checkpoints.newest() is None
    for step in (1, 2):
        checkpoints.save(step, {"w": torch.ones(4)}, score=1.0 * step)
        assert checkpoints.wait()
    assert names(tmp_path) == ["step-00000002", "step-original"]
