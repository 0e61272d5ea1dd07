"""Optional CPU backend: everything that exists only because CPUs need it. One entry point, `optimize`.

`optimize(model)` replaces modules by faster ones that compute the same, and sets up the allocator:

    onednn.py      matrix products of training by oneDNN
    linear.py      small-batch GEMM: linear layers that read their weights at memory bandwidth
    modules.py     whole layers, and a decoding step of a Llama, in one call of the native kernel
    native.c       that kernel, compiled for this machine when it is first used (native.py)
    search.py      argmax over a large vocabulary with int8 bounds; exact
    quantize.py    dynamic int8 quantization
    allocator.py   memory that is kept between steps, and huge pages

Without this folder, or with CALM_CPU=0, the package works the same, only slower. docs/performance.md has the numbers.
"""

import os

import torch
from torch import nn

from calm.cpu import allocator, modules, native, onednn, quantize, search
from calm.errors import UserError

SWITCH = "CALM_CPU"  # 0: leave everything to torch


def optimize(model: nn.Module, *, training: bool = False, int8: bool = False) -> None:
    """Make a model on a CPU faster, in place; its weights and its state dict stay the same.

    Args:
        model: a language model. On another device only `int8` matters, which is then refused.
        training: prepare for training instead of inference.
        int8: quantize the linear layers first, which cannot be undone.
    """
    device = next(model.parameters()).device.type
    if int8 and device != "cpu":
        raise UserError(f"int8 is for CPUs, and the model is on {device}; leave it out")
    if int8:
        if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
            raise UserError("int8 quantizes weights in fp32; leave out --dtype bf16 or --int8")
        quantize.quantize(model)
    if device != "cpu" or os.environ.get(SWITCH) == "0":
        return
    allocator.keep_memory()
    if not training:
        search.replace_search(model)
        modules.prepare_decoding(model)
    elif onednn.product() is not None:
        modules.replace_modules(model, onednn.REPLACEMENTS)


def description() -> dict[str, str]:
    """What `calm bench` reports about this backend."""
    enabled = os.environ.get(SWITCH) != "0"
    return {
        "native_kernel": "yes" if enabled and native.library() is not None else "no",
        "training_matmul": "oneDNN" if enabled and onednn.product() is not None else "torch",
    }
