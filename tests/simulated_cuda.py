"""A simulated CUDA device: tensors that report `cuda:0` and compute on the CPU.

Operations on tensors of both devices are refused. Waiting for the device and copies from the CPU are counted by the
line of `calm` that caused them. Not covered: CUDA kernels, autocast, NCCL. `tests/gpu.py` counts kernels at the paper's
sizes.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "bincount"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
RANDOM = {name: getattr(torch, name) for name in ("randn", "rand", "randint")}
RealGenerator = torch.Generator


class CudaTensor(torch.Tensor):
    """A tensor on the simulated device, with its values on the CPU."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        options = {"dtype": values.dtype, "strides": values.stride(), "storage_offset": values.storage_offset()}
        tensor: Any = torch.Tensor._make_wrapper_subclass(cls, values.shape, device="meta", **options)  # pyright: ignore
        tensor.values = values
        return tensor

    device = property(lambda self: CUDA)  # pyright: ignore
    is_cuda = property(lambda self: True)  # pyright: ignore
    is_meta = property(lambda self: False)  # pyright: ignore

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def tolist(self) -> Any:
        _current().wait("tolist")
        return self.values.tolist()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:  # chosen by device, so not from here
            return _attention(*args, **(kwargs or {}))
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):  # C++ would copy lists to the meta device
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(
                torch.tensor(part, dtype=torch.long).to(CUDA) if isinstance(part, list) else part for part in index
            )
            args = (args[0], index, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _current().run(func, args, kwargs or {})


def _attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, **more: Any
) -> Any:
    _current().attention["mask" if mask is not None else "causal" if is_causal else "full"] += 1
    if mask is not None:  # which C++ would turn into numbers on the meta device
        mask = torch.zeros(mask.shape, device=CUDA).masked_fill(~mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask, dropout, is_causal, None, **more)[0]


class Simulation(TorchDispatchMode):
    """Runs operations, and counts `waits`, `uploads` (by line), and kinds of `attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.attention: Counter[str] = Counter()

    def reset(self) -> None:
        for counter in (self.waits, self.uploads, self.attention):
            counter.clear()

    def wait(self, what: str) -> None:
        self.waits[f"{_line()} {what}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        others = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
        target = kwargs.get("device")
        kind = None if target is None else torch.device(target).type
        on_cuda = kind == "cuda" or (kind == "meta" and not _in_device_context())  # C++ sees our tensors as meta
        if not ours and not on_cuda:
            return func(*args, **kwargs)
        name, to_cpu = func._schema.name.split("::")[1], False
        if name in ("_to_copy", "copy_"):
            into_ours = isinstance(args[0], CudaTensor) if name == "copy_" else on_cuda or target is None
            to_cpu = bool(ours) and not into_ours
            if to_cpu:
                self.wait("copy to the CPU")
            elif others and not kwargs.get("non_blocking"):
                self.uploads[_line()] += 1
        elif ours:
            self._check(name, args, others)
        wrapped = {id(tensor.values): tensor for tensor in ours}
        plain_args, plain_kwargs = tree_map(lambda x: x.values if isinstance(x, CudaTensor) else x, (args, kwargs))
        if target is not None:
            plain_kwargs["device"] = torch.device("cpu")
        if name == "_to_copy" and not to_cpu and others:  # a copy, even if both are on the CPU
            plain_args = (plain_args[0].clone(), *plain_args[1:])
        output = func(*plain_args, **plain_kwargs)
        if name == "copy_" or to_cpu:
            return args[0] if name == "copy_" else output

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, CudaTensor):
                return value
            return wrapped.get(id(value)) if id(value) in wrapped else CudaTensor(value)

        return tree_map(wrap, output)

    def _check(self, name: str, args: Any, others: list[torch.Tensor]) -> None:
        indices: Any = [index for index in args[1] if index is not None] if name in INDEXING else []
        for index in indices:
            if not isinstance(index, CudaTensor):
                self.uploads[_line()] += 1
            elif index.dtype == torch.bool:
                self.wait(f"{name} by a mask")
        allowed = {id(index) for index in indices}
        if wrong := [tensor for tensor in others if tensor.ndim and id(tensor) not in allowed]:
            raise RuntimeError(f"{name} at {_line()} mixes cuda:0 and cpu {tuple(wrong[0].shape)}")
        if name in WAITS:
            self.wait(name)


class Generator:
    """torch.Generator for both devices."""

    def __init__(self, device: Any = "cpu"):
        self.device = CUDA if torch.device(device).type == "cuda" else torch.device("cpu")
        self.real = RealGenerator()

    def manual_seed(self, seed: int) -> "Generator":
        self.real.manual_seed(seed)
        return self


def _random(name: str) -> Any:
    def draw(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if isinstance(generator, Generator):
            device = torch.device(kwargs.get("device") or "cpu")
            assert device.type == generator.device.type, f"a generator on {generator.device} for {device}"
            generator = generator.real
        return RANDOM[name](*args, generator=generator, **kwargs)

    return draw


_stack: list[Simulation] = []


def _current() -> Simulation:
    return _stack[-1]


def _in_device_context() -> bool:
    """Whether `with torch.device("meta")` makes this tensor, as models are built before they have weights."""
    return any(frame.filename.endswith("torch/utils/_device.py") for frame in traceback.extract_stack())


def _line() -> str:
    """The innermost line of the package on the stack."""
    frames = [frame for frame in traceback.extract_stack() if "/src/calm/" in frame.filename]
    return f"{frames[-1].filename.rpartition('/calm/')[2]}:{frames[-1].lineno}" if frames else "test"


@contextmanager
def simulated_cuda() -> Iterator[Simulation]:
    """Within it, `cuda` is a device for tensors, modules, and generators."""
    simulation = Simulation()
    _stack.append(simulation)
    randoms = [patch.object(torch, name, _random(name)) for name in RANDOM]
    patches = [
        *randoms,
        patch.object(torch, "Generator", Generator),
        patch.object(torch.Tensor, "pin_memory", lambda self: self),
        patch.object(torch.cuda, "_lazy_init", lambda: None),
        patch.object(torch.cuda, "mem_get_info", lambda device=None: (80 * 10**9, 80 * 10**9)),
    ]
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda:0") then copies from the CPU
    try:
        for each in patches:
            each.start()
        with simulation:
            yield simulation
    finally:
        for each in patches:
            each.stop()
        torch._C._set_only_lift_cpu_tensors(False)
        _stack.pop()
