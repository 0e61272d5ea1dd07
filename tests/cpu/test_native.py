"""The native kernel: its products, its cache directory, and what happens where it cannot be compiled."""

import copy
import os
import shutil
import stat
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import psutil
import pytest
import torch

from calm import cpu
from calm.cpu import modules, native
from calm.llama import LlamaConfig
from calm.transformer import Transformer

LOAD = "from calm.cpu import native; print(native.library() is not None)"


# ----------------------------------------------------------------------------------------------------------- products


@pytest.mark.usefixtures("compiler", "threads")
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (33, 64), (300, 129)])  # small ones are left to one thread
@pytest.mark.parametrize("bias", [True, False])
def test_linear(count, shape, bias):
    torch.manual_seed(0)
    matrix, added = torch.randn(shape), torch.randn(shape[0])
    for x in (torch.randn(count, shape[1]), torch.randn(shape[1], count).T):
        output = native.linear(x, matrix, added if bias else None)
        expected = x.double() @ matrix.double().T + (added if bias else 0)
        # an fp32 sum of d products, in any order
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("compiler")
def test_nan_and_infinity_are_kept():
    matrix = torch.ones(3, 40)
    matrix[1, 7], matrix[2, 0] = torch.nan, torch.inf
    output = native.linear(torch.ones(1, 40), matrix)[0]
    assert output[0] == 40
    assert output[1].isnan()
    assert output[2] == torch.inf


def test_supported_weights():
    matrix = torch.randn(4, 6)
    assert native.supports(matrix) == (native.library() is not None)
    for other in (matrix.T, matrix.double(), matrix.bfloat16(), matrix.to("meta")):
        assert not native.supports(matrix, other)


# -------------------------------------------------------------------------------------------------- separate processes


def start(cache: Path, **variables: str) -> subprocess.Popen:
    """A process that loads the library."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", cpu.SWITCH)}
    environment |= {"XDG_CACHE_HOME": str(cache)} | variables
    return subprocess.Popen([sys.executable, "-c", LOAD], env=environment, stdout=-1, stderr=-1, text=True)


def is_loaded(process: subprocess.Popen) -> bool:
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (0, "")
    return stdout.strip() == "True"


@pytest.mark.usefixtures("compiler")
def test_compiled_once_by_concurrent_processes(tmp_path):
    processes = [start(tmp_path) for _ in range(3)]
    assert [is_loaded(process) for process in processes] == [True] * 3
    (file,) = (tmp_path / "calm").iterdir()
    modified = file.stat().st_mtime_ns
    assert is_loaded(start(tmp_path, PATH=""))  # no compiler is needed any more
    assert file.stat().st_mtime_ns == modified


@pytest.mark.usefixtures("compiler")
def test_truncated_library(tmp_path):
    """It is compiled again, and without a compiler ignored; loading it would be a bus error."""
    assert is_loaded(start(tmp_path))
    (file,) = (tmp_path / "calm").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert not is_loaded(start(tmp_path, PATH=""))
    assert is_loaded(start(tmp_path))
    assert len(file.read_bytes()) == len(whole)


def test_no_compiler(tmp_path):
    for number, variables in enumerate(({"PATH": ""}, {"PATH": "", "CC": ""}, {"CC": "/no/such"})):
        cache = tmp_path / str(number)
        assert not is_loaded(start(cache, **variables))
        assert not list(cache.glob("calm/*"))


# ------------------------------------------------------------------------------------------------------ cache directory


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, which `load` fills."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "calm"


def load() -> bool:
    """Whether the library is compiled and loaded; without the result of an earlier call."""
    return native.library.__wrapped__() is not None


def fake_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_access_the_cache(cache, umask):
    before = os.umask(umask)
    try:
        assert load()
    finally:
        os.umask(before)
    (file,) = cache.iterdir()
    assert (mode(cache), mode(file)) == (0o700, 0o700)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("permissions", [0o770, 0o702])
def test_directory_that_others_can_write_to_is_refused(cache, permissions):
    assert load()
    (file,) = cache.iterdir()
    cache.chmod(permissions)
    assert not load()
    file.unlink()
    assert not load()
    assert not list(cache.iterdir())  # nothing is compiled into it
    cache.chmod(0o755)
    assert load()


@pytest.mark.usefixtures("compiler")
def test_directory_of_another_user_is_refused(cache, monkeypatch):
    assert load()
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert not load()


@pytest.mark.usefixtures("compiler")
def test_symbolic_link_to_a_directory_is_refused(cache, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    assert not load()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.fixture
def compiled(cache) -> Path:
    """The library in its cache."""
    assert load()
    (file,) = cache.iterdir()
    return file


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("permissions", [0o770, 0o707, 0o722])
def test_library_that_others_can_write_to_is_compiled_again(compiled, monkeypatch, permissions):
    inode = compiled.stat().st_ino
    compiled.chmod(permissions)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert not load()  # it is not loaded either
    assert load()
    assert compiled.stat().st_ino != inode
    assert mode(compiled) == 0o700


@pytest.mark.usefixtures("compiler")
def test_library_of_another_user_is_compiled_again(compiled, monkeypatch):
    inode, own = compiled.stat().st_ino, os.getuid()
    for path in (os.environ["PATH"], ""):
        uids = iter([own, own + 1])  # of the directory, and of the file
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda uids=uids: next(uids))
            patch.setenv("PATH", path)
            assert load() == bool(path)
        assert compiled.stat().st_ino != inode


@pytest.mark.usefixtures("compiler")
def test_symbolic_link_to_a_library_is_compiled_again(compiled, tmp_path):
    elsewhere = tmp_path / "elsewhere.so"
    compiled.rename(elsewhere)
    content = elsewhere.read_bytes()
    compiled.symlink_to(elsewhere)
    assert load()
    assert not compiled.is_symlink()
    assert elsewhere.read_bytes() == content


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("length", [0, 31, 5000, -1])
def test_damaged_library_is_compiled_again(compiled, length):
    whole = compiled.read_bytes()
    compiled.write_bytes(whole[:length])
    assert native._compiled() == compiled
    assert compiled.read_bytes()[:4] == b"\x7fELF"
    assert native._is_whole(compiled)
    compiled.write_bytes(b"not a library")
    assert native._compiled() == compiled
    assert native._is_whole(compiled)
    assert [path.name for path in compiled.parent.iterdir()] == [compiled.name]


@pytest.mark.usefixtures("compiler")
def test_cache_that_is_a_file(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert not load()


@pytest.mark.usefixtures("compiler")
def test_no_home_directory(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert not load()


# ------------------------------------------------------------------------------------------------------------ fallback


@pytest.mark.usefixtures("compiler", "cache")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no cc")
@pytest.mark.parametrize("value", ["", "  ", "cc", "cc -g0"])
def test_cc(monkeypatch, value):
    """`CC` names the compiler and may have arguments; if it is empty, it is `cc`."""
    monkeypatch.setenv("CC", value)
    assert load()


OUTPUT = "for last; do :; done"  # the last argument of both calls is the name of the output

BROKEN = {
    "fails": "exit 1",
    "writes nothing": "exit 0",
    "writes no library": f'{OUTPUT}; echo garbage > "$last"',
    "makes a library without the functions": f'{OUTPUT}; echo "int x;" | cc -shared -x c - -o "$last"',
    "hangs": "exec sleep 60",
    "complains": "echo complaint >&2; kill -9 $$",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_compiler(kind, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "COMPILER_TIMEOUT", 0.5 if kind == "hangs" else 60)
    monkeypatch.setenv("CC", fake_compiler(tmp_path / "cc", BROKEN[kind]))
    assert not load()
    assert not any(path.is_dir() for path in cache.iterdir())  # no temporary directory is left


def has_ended(pid: int) -> bool:
    """Whether a process ends in the next seconds."""
    for _ in range(200):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    psutil.Process(pid).kill()
    return False


@pytest.mark.parametrize("end", ["wait", "kill -9 $$", "exit 1"])
def test_children_of_a_compiler_do_not_outlive_it(end, cache, tmp_path, monkeypatch):
    """It takes too long, is killed, or fails."""
    monkeypatch.setattr(native, "COMPILER_TIMEOUT", 2 if end == "wait" else 60)
    pid = tmp_path / "pid"
    monkeypatch.setenv("CC", fake_compiler(tmp_path / "cc", f'sleep 600 &\necho $! > "{pid}"\n{end}'))
    assert not load()
    assert has_ended(int(pid.read_text()))
    assert not any(path.is_dir() for path in cache.iterdir())


def logits_of(model: Transformer) -> torch.Tensor:
    """Of some tokens, the last of which are decoded one by one."""
    cache, tokens = model.backbone.new_cache(), torch.arange(6)[None, :, None]
    with torch.no_grad():
        states = [model.backbone(model.embed(tokens[:, :3]), cache=cache)]
        states += [model.backbone(model.embed(tokens[:, k : k + 1]), cache=cache) for k in range(3, 6)]
        return model.lm_head(torch.cat(states, dim=1))


@pytest.mark.parametrize(
    "variables", [{"PATH": ""}, {"PATH": "", "CC": ""}, {"CC": "false"}, {"CC": "/no/such"}, {"CC": "'"}]
)
def test_optimized_models_work_without_the_kernel(cache, monkeypatch, native_calls, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(native, "library", lru_cache(native.library.__wrapped__))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    plain = Transformer(LlamaConfig(vocab_size=20, **sizes))
    ours = copy.deepcopy(plain)
    cpu.optimize(ours)
    assert isinstance(ours.model, modules.NativeLlama)
    assert ours.model.weights is None
    torch.testing.assert_close(logits_of(ours), logits_of(plain))
    assert not native_calls
    assert cpu.description()["native_kernel"] == "no"
    assert not list(cache.glob("*"))
