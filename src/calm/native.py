"""native.c, compiled when it is first wanted and kept in the user's cache; without a compiler torch does its work.

It is compiled for this very processor. Its OpenMP is that of torch, whose threads it shares: a library that brought
another would have its own threads fight with torch's.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.c")
FAST = ("-O3", "-march=native", "-fno-math-errno", "-funroll-loops", "-fvariable-expansion-in-unroller")
COMPILE = ("-std=c11", *FAST, "-fopenmp", "-fPIC", "-c")
SWITCH = "CALM_NATIVE"  # set to 0, everything is left to torch
PATIENCE = 60  # seconds for a compiler


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


_POINTER, _NUMBER, _REAL, _THREADS = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
SIGNATURES: dict[str, list[Any]] = {
    "calm_product": [*[_POINTER] * 4, *[_NUMBER] * 3, _THREADS],
    "calm_layer": [*[_POINTER] * 7, *[_NUMBER] * 3, _REAL, _THREADS],
    "calm_energy_block": [*[_POINTER] * 5, *[_NUMBER] * 2, _REAL, _THREADS],
    "calm_llama_step": [*[_POINTER] * 6, *[_NUMBER] * 3, _POINTER, _THREADS],
}


@lru_cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or nothing where they cannot be had."""
    if sys.platform != "linux" or os.environ.get(SWITCH) == "0":
        return None
    try:
        found = ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError):  # no compiler, no home, another OpenMP
        return None
    for name, kinds in SIGNATURES.items():
        getattr(found, name).argtypes, getattr(found, name).restype = kinds, None
    return found


def _compiled() -> Path:
    """The library's file: one for each source, compiler and processor that a cache has seen."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    processor = sorted(torch.cpu.get_capabilities().items())
    key = hashlib.sha256(repr((SOURCE.read_bytes(), compiler, COMPILE, processor)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "calm"
    path = cache / f"native-{key}.so"
    if not path.exists():
        if shutil.which(compiler[0]) is None:
            raise FileNotFoundError(compiler[0])
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # so that it is whole or absent
            parts, whole = Path(folder) / "native.o", Path(folder) / path.name
            _run(*compiler, *COMPILE, str(SOURCE), "-o", str(parts))
            _run(*compiler, "-shared", str(parts), "-lm", "-o", str(whole))  # the linker is not told of OpenMP
            whole.replace(path)
    return path


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)


def takes(*weights: Tensor) -> bool:
    """Whether what is computed with these can be computed here."""
    here = (w.device.type == "cpu" and w.dtype == torch.float32 and w.is_contiguous() for w in weights)
    return all(here) and library() is not None


def product(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Few rows (n, d), a matrix (m, d) that this takes, and a bias (m,): (n, m), without gradients."""
    rows, (outputs, inputs) = rows.contiguous(), matrix.shape
    found = rows.new_empty(len(rows), outputs)
    own = None if bias is None else bias.data_ptr()
    _call("calm_product", matrix.data_ptr(), own, rows.data_ptr(), found.data_ptr(), len(rows), outputs, inputs)
    return found


def layer(rows: Tensor, weights: list[Tensor], eps: float) -> Tensor:
    """x + SwiGLU(RMSNorm(x)) of few rows (..., d); weights of the norm, gate, up and down."""
    inner, size = weights[1].shape
    count, found = rows.numel() // size, torch.empty_like(rows)
    scratch = rows.new_empty(count * (size + inner))
    given = (tensor.data_ptr() for tensor in (*weights, rows, found, scratch))
    _call("calm_layer", *given, count, size, inner, eps)
    return found


def energy_block(rows: Tensor, conditions: Tensor, weights: list[Tensor], eps: float) -> Tensor:
    """A block of the energy head, its weights in their order, on few rows (..., d) and as many conditions."""
    conditions, size = conditions.contiguous(), len(weights[0])
    count, found = rows.numel() // size, torch.empty_like(rows)
    scratch = rows.new_empty(2 * count * size)
    block = (ctypes.c_void_p * len(weights))(*(weight.data_ptr() for weight in weights))
    given = (tensor.data_ptr() for tensor in (rows, conditions, found, scratch))
    _call("calm_energy_block", block, *given, count, size, eps)
    return found


def llama_step(
    llama: Llama, layers: Any, states: Tensor, cosines: Tensor, sines: Tensor, first: Tensor, length: int, room: int
) -> None:
    """One more position of few texts, whose states (n, H) it changes; see native.c."""
    numbers = llama.size + 2 * (llama.heads + llama.shared) * llama.width + llama.inner  # of each text
    scratch = states.new_empty(len(states) * numbers)
    given = (tensor.data_ptr() for tensor in (states, cosines, sines, first))
    _call("calm_llama_step", ctypes.byref(llama), layers, *given, len(states), length, room, scratch.data_ptr())


def _call(name: str, *given: Any) -> None:
    getattr(library(), name)(*given, torch.get_num_threads())
