import pytest
import torch

from calm.cpu import native, onednn

OPERATOR = torch.ops.mkldnn._linear_pointwise


@pytest.fixture
def native_calls(monkeypatch) -> list[str]:
    """Names of the kernel's functions, in the order in which they are called."""
    names: list[str] = []
    call = native._call
    monkeypatch.setattr(native, "_call", lambda name, *arguments: (names.append(name), call(name, *arguments)))
    return names


@pytest.fixture
def no_native(monkeypatch) -> None:
    """As on a machine without a C compiler."""
    monkeypatch.setattr(native, "library", lambda: None)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request, monkeypatch) -> int:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


@pytest.fixture(params=["native", "torch"])
def kernel(request, monkeypatch) -> str:
    """With the native kernel, and without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C compiler")
    return request.param


@pytest.fixture(params=["oneDNN", "MKL"])
def matmul(request, monkeypatch) -> str:
    """Processors with and without AVX-512."""
    monkeypatch.setattr(onednn, "product", lambda: OPERATOR if request.param == "oneDNN" else None)
    return request.param
