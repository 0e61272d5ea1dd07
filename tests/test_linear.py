"""Layers that nobody notices: what they compute is what they computed, where their weights lie and in training."""

import copy
import sys

import pytest
import torch
from torch import nn

from calm import products
from calm.allocator import HUGE_PAGE
from calm.linear import FastLinear, change_layers, prepare_for_writing, side_by_side


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 1, 24), (1, 5, 24), (70, 24), (0, 24), (2, 0, 24)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("small", [0, products.SMALL])
def test_a_layer_computes_what_it_did(monkeypatch, shape, bias, small):
    monkeypatch.setattr(products, "SMALL", small)
    monkeypatch.setattr(products, "SMALL_FOR_SOME", small)
    torch.manual_seed(0)
    layer = nn.Linear(24, 32, bias=bias)
    swift = copy.deepcopy(layer)
    prepare_for_writing(swift)
    assert type(swift) is FastLinear
    given = torch.randn(shape)
    with torch.no_grad():
        found, expected = swift(given), layer(given)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)
    strided = torch.randn(24, 2).T  # rows that do not lie one behind the other
    with torch.no_grad():
        torch.testing.assert_close(swift(strided), layer(strided))


@pytest.mark.parametrize("wide", [True, False])
def test_training_computes_what_it_did(monkeypatch, wide):
    monkeypatch.setattr(products, "WIDE", wide)
    torch.manual_seed(0)
    layer = nn.Linear(24, 32)
    swift = copy.deepcopy(layer)
    change_layers(swift)
    given = torch.randn(3, 5, 24)
    found = []
    for each in (layer, swift):
        rows = given.clone().requires_grad_()
        loss = each(rows).square().sum()
        loss.backward()
        found.append([loss.detach(), rows.grad, each.weight.grad, each.bias.grad])
    for ours, expected in zip(*found[::-1], strict=True):
        torch.testing.assert_close(ours, expected)
        assert wide or torch.equal(ours, expected)


@pytest.mark.parametrize("small", [0, products.SMALL])
def test_the_bias_is_not_changed_and_neither_is_what_was_given(monkeypatch, small):
    monkeypatch.setattr(products, "SMALL", small)
    layer = FastLinear(8, 16)
    given = torch.randn(1, 8)
    before = [t.clone() for t in (given, layer.weight, layer.bias)]
    with torch.no_grad():
        layer(given)
    for now, then in zip((given, layer.weight, layer.bias), before, strict=True):
        assert torch.equal(now, then)


def test_layers_of_other_kinds_stay():
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Other(4, 4), nn.LayerNorm(4))
    prepare_for_writing(model)
    assert [type(part) for part in model] == [FastLinear, Other, nn.LayerNorm]
    assert list(model.state_dict()) == list(nn.Sequential(nn.Linear(4, 4), Other(4, 4), nn.LayerNorm(4)).state_dict())
    change_layers(model, nn.Linear)
    assert type(model[0]) is nn.Linear


def weights_of(layers) -> list[torch.Tensor]:
    return [layer.weight.detach().clone() for layer in layers]


@pytest.mark.parametrize("count", [1, 2, 70])
@pytest.mark.parametrize("kinds", [(nn.Linear, nn.Linear), (FastLinear, nn.Linear, FastLinear), (nn.Linear,)])
def test_layers_side_by_side(monkeypatch, count, kinds):
    monkeypatch.setattr(products, "SMALL", 0)
    torch.manual_seed(0)
    layers = [kind(8, 4 * (k + 1), bias=False) for k, kind in enumerate(kinds)]
    before, rows = weights_of(layers), torch.randn(count, 8)
    with torch.no_grad():
        found = side_by_side(layers)(rows)
        torch.testing.assert_close(found, torch.cat([rows @ weight.T for weight in before], dim=1))
    places = [layer.weight.data_ptr() for layer in layers]
    side_by_side(layers)
    assert [layer.weight.data_ptr() for layer in layers] == places  # they lie well already
    for layer, weight in zip(layers, before, strict=True):
        assert torch.equal(layer.weight, weight)
        assert layer.weight.requires_grad


def test_layers_side_by_side_share_their_weights_with_what_trains():
    layers = [nn.Linear(8, 4, bias=False) for _ in range(2)]
    product, rows = side_by_side(layers), torch.randn(3, 8)
    sum(layer(rows).square().sum() for layer in layers).backward()
    torch.optim.SGD([layer.weight for layer in layers], lr=0.1).step()
    with torch.no_grad():
        torch.testing.assert_close(product(rows), torch.cat([layer(rows) for layer in layers], dim=1))


def test_neighbours_in_memory_that_are_in_another_order_are_moved():
    layers = [nn.Linear(8, 4, bias=False) for _ in range(2)]
    side_by_side(layers)
    before, rows = weights_of(layers), torch.randn(1, 8)
    with torch.no_grad():
        found = side_by_side(layers[::-1])(rows)
        torch.testing.assert_close(found, torch.cat([rows @ weight.T for weight in before[::-1]], dim=1))
        torch.testing.assert_close(layers[0](rows), rows @ before[0].T)


def test_layers_that_are_no_single_matrix_are_called_one_by_one():
    class Twice(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    with torch.inference_mode():
        frozen = nn.Linear(8, 4, bias=False)
    rows = torch.randn(2, 8)
    for layers in ([nn.Linear(8, 4), nn.Linear(8, 6)], [Twice(8, 4, bias=False)], [frozen, frozen]):
        places = [layer.weight.data_ptr() for layer in layers]
        with torch.no_grad():
            found = side_by_side(layers)(rows)
            torch.testing.assert_close(found, torch.cat([layer(rows) for layer in layers], dim=1))
        assert [layer.weight.data_ptr() for layer in layers] == places


def test_large_matrices_are_moved_once_and_stay_the_layers_own():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(1024, 2048, bias=False), nn.Linear(1024, 1024), nn.Linear(1024, 1024, bias=False)])
    small = nn.Linear(8, 16)
    rows = torch.randn(1, 1024)
    with torch.no_grad():
        expected = [layer(rows) for layer in model]
        both = side_by_side([model[0], model[2]])
        prepare_for_writing(nn.ModuleList([*model, small]))
        places = [layer.weight.data_ptr() for layer in model]
        assert places[1] % HUGE_PAGE == 0 or not sys.platform.startswith("linux")
        again = side_by_side([model[0], model[2]])
        prepare_for_writing(model)
        assert places == [layer.weight.data_ptr() for layer in model]
        for layer, found in zip(model, expected, strict=True):
            torch.testing.assert_close(layer(rows), found)
        for product in (both, again):
            torch.testing.assert_close(product(rows), torch.cat([expected[0], expected[2]], dim=-1))
        model[0].weight.zero_()  # as training would change them
        assert not both(rows)[:, :2048].any()


def test_a_layer_notices_that_its_weights_are_others(monkeypatch):
    monkeypatch.setattr(products, "SMALL", 0)
    torch.manual_seed(0)
    layer, other, rows = FastLinear(8, 16), nn.Linear(8, 16), torch.randn(1, 8)
    with torch.no_grad():
        layer(rows)
        layer.weight.mul_(2)  # changed where they lie
        torch.testing.assert_close(layer(rows), rows @ layer.weight.T + layer.bias)
        layer.weight.data = other.weight.data.clone()
        layer.bias.copy_(other.bias)
        torch.testing.assert_close(layer(rows), other(rows))
        layer.weight = nn.Parameter(-other.weight)
        torch.testing.assert_close(layer(rows), -(rows @ other.weight.T) + other.bias)
        twin = copy.deepcopy(layer)
        twin.weight.zero_()
        torch.testing.assert_close(twin(rows), other.bias[None])
        torch.testing.assert_close(layer(rows), -(rows @ other.weight.T) + other.bias)
