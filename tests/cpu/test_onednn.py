"""Matrix products by oneDNN: the values and gradients of `F.linear`."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from calm.autoencoder import SplitLinear, VocabularyProjection
from calm.cpu import modules, onednn
from calm.cpu.onednn import OneDNNLinear, OneDNNProjection, OneDNNSplitLinear, linear
from tests.cpu.conftest import OPERATOR

PRODUCTS = {"oneDNN": lambda: OPERATOR, "torch": lambda: None}


@pytest.fixture
def enabled(monkeypatch) -> None:
    """As on a processor with AVX-512."""
    monkeypatch.setattr(onednn, "product", PRODUCTS["oneDNN"])


def make_inputs(*shape: int) -> list[torch.Tensor]:
    """Rows of a shape, a weight, and a bias."""
    torch.manual_seed(0)
    return [torch.randn(size).requires_grad_() for size in ((*shape, 24), (32, 24), (32,))]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (0,), (2, 0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.usefixtures("enabled")
def test_outputs_and_gradients(shape, bias, strided):
    """Also for an incoming gradient that is expanded from one number, and for strided inputs."""
    results = []
    for product in (linear, F.linear):
        values = make_inputs(*shape)[: 3 if bias else 2]
        x = torch.cat([values[0], values[0]], dim=-1)[..., ::2] if strided else values[0]
        output = product(x, *values[1:])
        gradients = torch.autograd.grad(output.sum() + output.square().sum(), values)
        results.append([output, *gradients, *torch.autograd.grad(product(x, *values[1:]).sum(), values)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)  # fp32 sums of 24 and up to 14 products


@pytest.mark.usefixtures("enabled")
def test_strided_inputs():
    torch.manual_seed(0)
    weight = torch.randn(48, 24)
    for x in (torch.randn(24, 2).T, torch.randn(2, 48)[:, ::2], torch.randn(1, 24).as_strided((1, 24), (1, 1), 0)):
        torch.testing.assert_close(linear(x, weight), x @ weight.T)


@pytest.mark.usefixtures("enabled")
def test_only_required_gradients_are_computed():
    for required in itertools.product((True, False), repeat=3):
        if any(required):
            values = [v.detach().requires_grad_(flag) for v, flag in zip(make_inputs(5), required, strict=True)]
            linear(*values).sum().backward()
            assert tuple(value.grad is not None for value in values) == required


@pytest.mark.usefixtures("enabled")
def test_second_derivatives():
    results = []
    for product in (linear, F.linear):
        x, weight, bias = make_inputs(5)
        (first,) = torch.autograd.grad(product(x, weight, bias).pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), (x, weight)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.usefixtures("enabled")
def test_forward_mode_derivatives():
    """torch.func.jvp, as the mean flow uses it: oneDNN's operator has no tangents and would lose them silently."""
    x, weight, bias = (value.detach() for value in make_inputs(5))
    tangent = torch.randn_like(x)
    with torch.no_grad():
        value, derivative = torch.func.jvp(lambda x: linear(x, weight, bias), (x,), (tangent,))
    torch.testing.assert_close(value, F.linear(x, weight, bias))
    torch.testing.assert_close(derivative, tangent @ weight.T)


@pytest.mark.usefixtures("enabled")
def test_autocast_and_bfloat16():
    x, weight, bias = make_inputs(5)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    half = [value.detach().bfloat16() for value in (x, weight, bias)]
    assert torch.equal(linear(*half), F.linear(*half))


@pytest.mark.parametrize("backend", PRODUCTS)
def test_operator(monkeypatch, backend):
    """oneDNN is called where it is enabled, and only there."""
    x, weight, _ = make_inputs(5)
    monkeypatch.setattr(onednn, "product", PRODUCTS[backend])
    with torch.profiler.profile() as profile:
        linear(x, weight)
    called = any(OPERATOR.__name__ in event.key for event in profile.key_averages())
    assert called == (backend == "oneDNN")


@pytest.mark.parametrize(
    ("capabilities", "available", "expected"),
    [
        ({"avx512_f": True}, True, OPERATOR),
        ({"avx512_f": False}, True, None),
        ({}, True, None),
        ({"avx512_f": True}, False, None),
    ],
)
def test_processors(monkeypatch, capabilities, available, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: available)
    monkeypatch.setattr(onednn, "register_flop_formula", lambda operator: lambda formula: None)  # only once per process
    assert onednn.product.__wrapped__() is expected


@pytest.mark.skipif(onednn.product() is None, reason="no AVX-512")
def test_flops_are_counted():
    x, weight, bias = (value.detach() for value in make_inputs(2, 3))
    for product in (linear, F.linear):
        with FlopCounterMode(display=False) as counter:
            product(x, weight, bias)
        assert counter.get_total_flops() == 2 * 6 * 24 * 32


class Layers(nn.Module):
    """One module of each kind that is replaced."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 32)
        self.split = SplitLinear(32, 3, 8)
        self.project = VocabularyProjection()
        self.vocabulary = nn.Parameter(torch.randn(40, 8))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        states = self.linear(x)
        return [self.project(self.split(states), self.vocabulary), self.split(states, 1, 3), self.split(states, 0, 1)]


@pytest.mark.parametrize("backend", PRODUCTS)
def test_replaced_modules_train_alike(monkeypatch, backend):
    monkeypatch.setattr(onednn, "product", PRODUCTS[backend])
    torch.manual_seed(0)
    plain = Layers()
    ours = copy.deepcopy(plain)
    modules.replace_modules(ours, onednn.REPLACEMENTS)
    assert [type(child) for child in ours.children()] == [OneDNNLinear, OneDNNSplitLinear, OneDNNProjection]
    x, results = torch.randn(3, 5, 24), []
    for model in (ours, plain):
        rows = x.clone().requires_grad_()
        outputs = model(rows)
        sum(output.square().sum() for output in outputs).backward()
        results.append(
            [*(output.detach() for output in outputs), rows.grad, *(parameter.grad for parameter in model.parameters())]
        )
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert backend == "oneDNN" or torch.equal(found, expected)
