"""Layers in C against the layers that they are."""

import copy

import pytest
import torch
from torch import nn

from calm import native
from calm.heads.energy import Block
from calm.linear import change_layers
from calm.models.int8 import to_int8
from calm.models.layer import Layer
from calm.sampling import native_layers
from calm.sampling.native_layers import NativeBlock, NativeLayer, take_native_layers

SIZE = 37  # is no multiple of anything that a processor takes at once


pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Of functions in C."""
    made: list[str] = []
    plain = native._call
    monkeypatch.setattr(native, "_call", lambda name, *given: (made.append(name), plain(name, *given)))
    return made


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    """A layer and its twin that takes native.c, with weights that hide nothing."""
    torch.manual_seed(0)
    plain: nn.Module = Layer(SIZE, 53, 0.1) if kind == "layer" else Block(SIZE)
    for weight in plain.parameters():
        nn.init.normal_(weight, mean=0.1, std=0.3)
    ours = copy.deepcopy(plain)
    change_layers(ours)
    take_native_layers(ours)
    return plain, ours


def given(kind: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
    rows = torch.randn(*shape, SIZE)
    return [rows] if kind == "layer" else [rows, torch.randn(*shape[1:], SIZE)]


def assert_same(plain: nn.Module, ours: nn.Module, rows: list[torch.Tensor]) -> None:
    before = [part.clone() for part in rows]
    with torch.no_grad():
        # sums of some dozens of products in another order, through three to five layers
        torch.testing.assert_close(ours(*rows), plain(*rows), rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, rows, before))


@pytest.mark.parametrize("kind", ["layer", "block"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (1, 2, 2)])
def test_few_rows_are_one_call(kind, shape, calls):
    plain, ours = pair(kind)
    assert type(ours) in (NativeLayer, NativeBlock)
    assert_same(plain, ours, given(kind, shape))
    assert calls == ["calm_layer" if kind == "layer" else "calm_energy_block"]


@pytest.mark.parametrize("kind", ["layer", "block"])
@pytest.mark.parametrize("shape", [(1, 0), (2, 3), (70, 1)])
def test_none_and_many_are_left_to_torch(kind, shape, calls):
    plain, ours = pair(kind)
    assert_same(plain, ours, given(kind, shape))
    assert not {"calm_layer", "calm_energy_block"} & set(calls)


def test_samples_that_share_a_condition_are_left_to_torch(calls):
    plain, ours = pair("block")
    assert_same(plain, ours, given("block", (2, 1)))
    assert "calm_energy_block" not in calls


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_with_gradients_it_is_torch(kind, calls):
    plain, ours = pair(kind)
    rows = given(kind, (1, 1))
    for each in (plain, ours):
        each(*rows).square().sum().backward()
    for found, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert (found.grad - expected.grad).norm() <= 1e-4 * expected.grad.norm()  # sums in another order
    assert not calls


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_other_numbers(kind, calls):
    plain, ours = (layer.double() for layer in pair(kind))
    assert_same(plain, ours, [part.double() for part in given(kind, (1, 1))])
    ours.float().norm.double()  # what is not all of one kind is not read as if it were
    assert native_layers._weights(torch.randn(1, SIZE), *ours.children()) is None
    assert not calls


def test_weights_that_change_and_move_are_seen(calls):
    plain, ours = pair("layer")
    rows = given("layer", (1, 1))
    assert_same(plain, ours, rows)
    with torch.no_grad():
        for layer in (plain, ours):
            layer.gate.weight.mul_(2)
            layer.down.weight.data = -layer.down.weight.data
    assert_same(plain, ours, rows)
    assert calls == ["calm_layer"] * 2


def test_who_looks_at_a_part_sees_it(calls):
    _, ours = pair("layer")
    seen: list[torch.Tensor] = []
    ours.down.register_forward_hook(lambda module, rows, found: seen.append(found))
    with torch.no_grad():
        ours(torch.randn(1, SIZE))
    assert len(seen) == 1
    assert "calm_layer" not in calls


def test_in_eight_bits_it_is_torch(calls):
    class Model(nn.Module):
        device = torch.device("cpu")

        def __init__(self):
            super().__init__()
            self.layer = pair("layer")[1]

    model, rows = Model(), torch.randn(1, SIZE)
    with torch.no_grad():
        expected = model.layer(rows)
        to_int8(model)
        del calls[:]
        torch.testing.assert_close(model.layer(rows), expected, rtol=0.1, atol=0.5)  # two digits
    assert not calls


def test_names_and_weights_stay():
    plain, ours = pair("block")
    assert list(ours.state_dict()) == list(plain.state_dict())
    for name, weight in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight)


def test_without_a_compiler_nothing_changes(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    assert [type(pair(kind)[1]) for kind in ("layer", "block")] == [Layer, Block]
