"""native.c, compiled when it is first used and kept in the user's cache; without a compiler torch does its work.

It is compiled for this very processor. Its OpenMP runtime is the one that torch has loaded, whose threads it shares:
a second runtime would have threads of its own that compete with torch's.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.c")
OPTIMIZATION = ("-O3", "-march=native", "-fno-math-errno", "-funroll-loops", "-fvariable-expansion-in-unroller")
COMPILE = ("-std=c11", *OPTIMIZATION, "-fopenmp", "-fPIC", "-c")
COMPILER_TIMEOUT = 60  # seconds


class LlamaLayer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("norm", "project", "output", "mlp_norm", "gate_up", "down", "keys", "values")
    ]


class Llama(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("layers", "size", "inner", "heads", "shared", "width")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("norm", ctypes.c_void_p),
    ]


_POINTER, _LONG, _FLOAT, _THREADS = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
SIGNATURES: dict[str, list[Any]] = {
    "calm_product": [*[_POINTER] * 4, *[_LONG] * 3, _THREADS],
    "calm_layer": [*[_POINTER] * 7, *[_LONG] * 3, _FLOAT, _THREADS],
    "calm_energy_block": [*[_POINTER] * 5, *[_LONG] * 2, _FLOAT, _THREADS],
    "calm_llama_step": [*[_POINTER] * 7, *[_LONG] * 2, _POINTER, _THREADS],
}


@lru_cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None if they cannot be had."""
    if sys.platform != "linux":
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled()))
        for name, kinds in SIGNATURES.items():
            getattr(loaded, name).argtypes, getattr(loaded, name).restype = kinds, None
    except (OSError, RuntimeError, ValueError, AttributeError, subprocess.SubprocessError):
        return None  # no compiler, no home directory, a cache of somebody else, another OpenMP runtime
    return loaded


def _compiled() -> Path:
    """The library's file: one for each source, compiler, and processor."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    processor = sorted(torch.cpu.get_capabilities().items())
    key = hashlib.sha256(repr((SOURCE.read_bytes(), compiler, COMPILE, processor)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "calm"
    path = cache / f"native-{key}.so"
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_trusted(cache):
        raise PermissionError(f"{cache} belongs to another user, or others can write to it")
    if not path.exists() or not _is_trusted(path) or not _is_whole(path):
        if shutil.which(compiler[0]) is None:
            raise FileNotFoundError(compiler[0])
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # so that it is whole or absent
            parts, whole = Path(folder) / "native.o", Path(folder) / path.name
            _run(*compiler, *COMPILE, str(SOURCE), "-o", str(parts))
            _run(*compiler, "-shared", str(parts), "-lm", "-o", str(whole))  # the linker is not told of OpenMP
            whole.write_bytes((content := whole.read_bytes()) + hashlib.sha256(content).digest())
            whole.chmod(0o700)
            whole.replace(path)
    return path


def _is_trusted(path: Path) -> bool:
    """Whether a file or directory belongs to this user and nobody else can write to it."""
    info = path.lstat()
    return info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not path.is_symlink()


def _is_whole(path: Path) -> bool:
    """Whether a file ends with the digest of its content: loading a truncated library would kill the process."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(*command: str) -> None:
    """Run a command. If it fails, is killed, or takes too long, the processes that it has started are killed."""
    none = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=none, stdout=none, stderr=none, start_new_session=True)
    try:
        if code := process.wait(COMPILER_TIMEOUT):
            raise subprocess.CalledProcessError(code, command)
    except BaseException:
        with suppress(ProcessLookupError):  # none is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def supports(*weights: Tensor) -> bool:
    """Whether the kernel can compute with these weights."""
    plain = (w.device.type == "cpu" and w.dtype == torch.float32 and w.is_contiguous() for w in weights)
    return all(plain) and library() is not None


def linear(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows (n, d), a matrix (m, d), a bias (m,) → (n, m), without gradients."""
    rows, (outputs, inputs) = rows.contiguous(), matrix.shape
    output = rows.new_empty(len(rows), outputs)
    own = None if bias is None else bias.data_ptr()
    _call("calm_product", matrix.data_ptr(), own, rows.data_ptr(), output.data_ptr(), len(rows), outputs, inputs)
    return output


def swiglu_layer(rows: Tensor, weights: list[Tensor], eps: float) -> Tensor:
    """x + SwiGLU(RMSNorm(x)) of rows (..., d); weights of the norm, gate, up, and down."""
    inner, size = weights[1].shape
    count, output = rows.numel() // size, torch.empty_like(rows)
    scratch = rows.new_empty(count * (size + inner))
    pointers = (tensor.data_ptr() for tensor in (*weights, rows, output, scratch))
    _call("calm_layer", *pointers, count, size, inner, eps)
    return output


def energy_block(rows: Tensor, conditions: Tensor, weights: list[Tensor], eps: float) -> Tensor:
    """A block of the energy head on rows (..., d) and as many conditions; weights in their order."""
    conditions, size = conditions.contiguous(), len(weights[0])
    count, output = rows.numel() // size, torch.empty_like(rows)
    scratch = rows.new_empty(2 * count * size)
    block = (ctypes.c_void_p * len(weights))(*(weight.data_ptr() for weight in weights))
    pointers = (tensor.data_ptr() for tensor in (rows, conditions, output, scratch))
    _call("calm_energy_block", block, *pointers, count, size, eps)
    return output


def llama_step(
    llama: Llama,
    layers: Any,
    states: Tensor,
    cosines: Tensor,
    sines: Tensor,
    first: Tensor,
    last: Tensor,
    capacity: int,
) -> None:
    """One more position of n sequences, whose states (n, H) it changes in place; see native.c."""
    numbers = llama.size + 2 * (llama.heads + llama.shared) * llama.width + llama.inner  # per sequence
    scratch = states.new_empty(len(states) * numbers)
    pointers = (tensor.data_ptr() for tensor in (states, cosines, sines, first, last))
    _call("calm_llama_step", ctypes.byref(llama), layers, *pointers, len(states), capacity, scratch.data_ptr())


def _call(name: str, *arguments: Any) -> None:
    getattr(library(), name)(*arguments, torch.get_num_threads())
