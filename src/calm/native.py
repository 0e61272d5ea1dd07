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

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.c")
FAST = ("-O3", "-march=native", "-fno-math-errno", "-funroll-loops", "-fvariable-expansion-in-unroller")
COMPILE = ("-std=c11", *FAST, "-fopenmp", "-fPIC", "-c")
SWITCH = "CALM_NATIVE"  # set to 0, everything is left to torch
PATIENCE = 60  # seconds for a compiler


class Layer(ctypes.Structure):
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


@lru_cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or nothing where they cannot be had."""
    if sys.platform != "linux" or os.environ.get(SWITCH) == "0":
        return None
    try:
        found = ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError):  # no compiler, no home, another OpenMP
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    found.calm_product.argtypes = [pointer] * 4 + [number] * 3 + [ctypes.c_int]
    found.calm_llama_step.argtypes = [pointer] * 5 + [number] * 2 + [pointer, ctypes.c_int]
    found.calm_product.restype = found.calm_llama_step.restype = None
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
    functions = library()
    assert functions is not None
    functions.calm_product(
        matrix.data_ptr(),
        rows.data_ptr(),
        None if bias is None else bias.data_ptr(),
        found.data_ptr(),
        outputs,
        inputs,
        len(rows),
        torch.get_num_threads(),
    )
    return found
