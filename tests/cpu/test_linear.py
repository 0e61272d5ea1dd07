"""Small-batch linear layers: the values of `F.linear`, wherever the weights are, and ordinary layers in training."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from calm.autoencoder import SplitLinear, VocabularyProjection
from calm.cpu import linear, modules
from calm.cpu.allocator import HUGE_PAGE, on_huge_pages
from calm.cpu.linear import NATIVE_ROWS, SLICED_ROWS, FastLinear, fuse, is_small_batch, small_batch_linear


@pytest.fixture(params=["large", "small"])
def matrices(request, monkeypatch) -> str:
    """Matrices that count as large enough to be sliced, and the usual limits."""
    if request.param == "large":
        monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
        monkeypatch.setattr(linear, "MIN_ELEMENTS_MANY_ROWS", 0)
    return request.param


def optimized(module: nn.Module) -> nn.Module:
    """A copy of a module, replaced for inference."""
    parent = nn.Sequential(copy.deepcopy(module))
    modules.prepare_decoding(parent)
    return parent[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, SLICED_ROWS, SLICED_ROWS + 1])
@pytest.mark.parametrize("size", [48, 50, 17])  # 16, 2, and 1 slices
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("matmul", "matrices")
def test_small_batch_linear(count, size, bias):
    """In fp64, which is left to torch."""
    generator = torch.Generator().manual_seed(count)
    x, weight, added = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((count, 24), (size, 24), (size,))
    )
    output = small_batch_linear(x, weight, added if bias else None)
    assert output.shape == (count, size)
    torch.testing.assert_close(output, F.linear(x, weight, added if bias else None), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("kernel", "matmul", "matrices")
@torch.no_grad()
def test_strided_inputs_and_weights():
    torch.manual_seed(0)
    weight = torch.randn(48, 24)
    for x in (torch.randn(24, 2).T, torch.randn(2, 48)[:, ::2], torch.randn(1, 24).as_strided((1, 24), (1, 1), 0)):
        for matrix in (weight, torch.randn(24, 48).T, torch.randn(48, 48)[:, ::2]):
            torch.testing.assert_close(small_batch_linear(x, matrix), x @ matrix.T)


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 1, 24), (1, 5, 24), (70, 24), (0, 24), (2, 0, 24)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("kernel", "matmul", "matrices")
@torch.no_grad()
def test_fast_linear(shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(24, 32, bias=bias)
    fast = optimized(layer)
    assert type(fast) is FastLinear
    x = torch.randn(shape)
    output, expected = fast(x), layer(x)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected)
    strided = torch.randn(24, 2).T
    torch.testing.assert_close(fast(strided), layer(strided))


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 1, 24), (5, 24), (70, 24), (0, 24)])
@pytest.mark.usefixtures("kernel", "matmul", "matrices")
@torch.no_grad()
def test_fast_split_linear_and_projection(shape):
    torch.manual_seed(0)
    split, project = SplitLinear(24, 3, 16), VocabularyProjection()
    fast_split, fast_project = optimized(split), optimized(project)
    assert (type(fast_split), type(fast_project)) == (linear.FastSplitLinear, linear.FastProjection)
    x, vocabulary = torch.randn(shape), torch.randn(40, 24)
    for first, last in ((0, None), (0, 1), (1, 3)):
        output, expected = fast_split(x, first, last), split(x, first, last)
        assert output.shape == expected.shape
        torch.testing.assert_close(output, expected)
    output, expected = fast_project(x, vocabulary), project(x, vocabulary)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected)


@pytest.mark.usefixtures("compiler")
def test_native_kernel_computes_few_rows_in_fp32_without_gradients(native_calls):
    layer = FastLinear(24, 32)
    with torch.no_grad():
        layer(torch.randn(NATIVE_ROWS, 24))
    assert native_calls == ["calm_product"]
    layer(torch.randn(1, 24))  # with gradients
    with torch.no_grad():
        layer(torch.randn(NATIVE_ROWS + 1, 24))
        layer(torch.empty(0, 24))
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(1, 24)).dtype == torch.bfloat16
        torch.func.jvp(layer, (torch.randn(1, 24),), (torch.randn(1, 24),))
        layer.double()(torch.randn(1, 24, dtype=torch.float64))
    assert native_calls == ["calm_product"]


def test_is_small_batch():
    x = torch.randn(2, 3, 8)
    assert not is_small_batch(x, 6)  # gradients are enabled
    with torch.no_grad():
        assert is_small_batch(x, 6)
        assert not is_small_batch(x, 5)
        assert not is_small_batch(x[:0], 6)
        assert not is_small_batch(x.double(), 6)
        assert not is_small_batch(x.to("meta"), 6)


@pytest.mark.usefixtures("kernel")
def test_training(matmul):
    torch.manual_seed(0)
    layer = nn.Linear(24, 32)
    x, results = torch.randn(3, 5, 24), []
    for module in (optimized(layer), layer):
        rows = x.clone().requires_grad_()
        loss = module(rows).square().sum()
        loss.backward()
        results.append([loss.detach(), rows.grad, module.weight.grad, module.bias.grad])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
        assert matmul == "oneDNN" or torch.equal(found, expected)


@pytest.mark.usefixtures("kernel", "matmul", "matrices")
def test_inputs_and_parameters_are_not_modified():
    layer = FastLinear(8, 16)
    for count in (1, 9):
        tensors = torch.randn(count, 8), layer.weight, layer.bias
        before = [tensor.clone() for tensor in tensors]
        with torch.no_grad():
            layer(tensors[0])
        assert all(map(torch.equal, tensors, before))


@pytest.mark.usefixtures("kernel", "matmul", "matrices")
@torch.no_grad()
def test_weights_may_be_changed_moved_and_replaced():
    torch.manual_seed(0)
    layer, other, x = FastLinear(8, 16), nn.Linear(8, 16), torch.randn(1, 8)
    layer(x)
    layer.weight.mul_(2)  # in place
    torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)
    layer.weight.data = other.weight.data.clone()
    layer.bias.copy_(other.bias)
    torch.testing.assert_close(layer(x), other(x))
    layer.weight = nn.Parameter(-other.weight)
    torch.testing.assert_close(layer(x), -(x @ other.weight.T) + other.bias)
    twin = copy.deepcopy(layer)
    twin.weight.zero_()
    torch.testing.assert_close(twin(x), other.bias[None])
    torch.testing.assert_close(layer(x), -(x @ other.weight.T) + other.bias)


# ------------------------------------------------------------------------------------------------------ fused weights


def weights_of(layers) -> list[torch.Tensor]:
    return [layer.weight.detach().clone() for layer in layers]


@pytest.mark.parametrize("count", [1, 2, 70])
@pytest.mark.parametrize("kinds", [(nn.Linear, nn.Linear), (FastLinear, nn.Linear, FastLinear), (nn.Linear,)])
@pytest.mark.usefixtures("matrices")
def test_fuse(count, kinds):
    torch.manual_seed(0)
    layers = [kind(8, 4 * (k + 1), bias=False) for k, kind in enumerate(kinds)]
    before, x = weights_of(layers), torch.randn(count, 8)
    with torch.no_grad():
        output = small_batch_linear(x, fuse(layers))
        torch.testing.assert_close(output, torch.cat([x @ weight.T for weight in before], dim=1))
    pointers = [layer.weight.data_ptr() for layer in layers]
    fuse(layers)
    assert [layer.weight.data_ptr() for layer in layers] == pointers  # already fused
    for layer, weight in zip(layers, before, strict=True):
        assert torch.equal(layer.weight, weight)
        assert layer.weight.requires_grad


def test_fused_weights_follow_training():
    layers = [nn.Linear(8, 4, bias=False) for _ in range(2)]
    matrix, x = fuse(layers), torch.randn(3, 8)
    sum(layer(x).square().sum() for layer in layers).backward()
    torch.optim.SGD([layer.weight for layer in layers], lr=0.1).step()
    with torch.no_grad():
        torch.testing.assert_close(x @ matrix.T, torch.cat([layer(x) for layer in layers], dim=1))


def test_fuse_in_another_order_moves_weights_again():
    layers = [nn.Linear(8, 4, bias=False) for _ in range(2)]
    fuse(layers)
    before, x = weights_of(layers), torch.randn(1, 8)
    with torch.no_grad():
        output = x @ fuse(layers[::-1]).T
        torch.testing.assert_close(output, torch.cat([x @ weight.T for weight in before[::-1]], dim=1))
        torch.testing.assert_close(layers[0](x), x @ before[0].T)


@torch.no_grad()
def test_large_matrices_are_moved_once():
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 2048, bias=False), nn.Linear(1024, 1024), nn.Linear(1024, 1024, bias=False)]
    model, x = nn.ModuleList([*layers, nn.Linear(8, 16)]), torch.randn(1, 1024)
    expected = [layer(x) for layer in layers]
    matrix = fuse([model[0], model[2]])
    modules.prepare_decoding(model)
    pointers = [layer.weight.data_ptr() for layer in model]
    assert pointers[1] % HUGE_PAGE == 0 or not sys.platform.startswith("linux")
    again = fuse([model[0], model[2]])
    modules.prepare_decoding(model)
    assert pointers == [layer.weight.data_ptr() for layer in model]
    for layer, output in zip(model, expected, strict=False):
        torch.testing.assert_close(layer(x), output)
    for fused in (matrix, again):
        torch.testing.assert_close(x @ fused.T, torch.cat([expected[0], expected[2]], dim=-1))
    model[0].weight.zero_()  # as training changes them
    assert not (x @ matrix.T)[:, :2048].any()


def test_on_huge_pages():
    large = torch.randn(2 * HUGE_PAGE // 4 + 1000)[1000:].view(-1, 256)  # a view of other memory
    small = torch.randn(16, 256)
    assert on_huge_pages(large) is large
    assert on_huge_pages(small) is small
    copied = large.clone()
    moved = on_huge_pages(copied)
    assert torch.equal(moved, large)
    assert moved.data_ptr() % HUGE_PAGE == 0 or not sys.platform.startswith("linux")
    assert on_huge_pages(moved) is moved
