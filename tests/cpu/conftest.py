import pytest
import torch

from calm.cpu import native


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
