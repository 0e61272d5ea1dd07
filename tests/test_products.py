"""Products are products, whichever way they take: the same numbers as the libraries', and the same gradients."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from calm import products
from calm.products import MANY, ONE_DNN, FewRows, linear, long_product


@pytest.fixture
def wide(monkeypatch):
    """As on a processor where oneDNN is taken."""
    monkeypatch.setattr(products, "WIDE", True)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, MANY, MANY + 1])
@pytest.mark.parametrize("words", [48, 50, 17])  # cut into 16, 2 and 1 slices
@pytest.mark.parametrize("product", [lambda rows, matrix: FewRows(matrix)(rows), long_product])
@pytest.mark.parametrize("small", [0, products.SMALL])  # matrices that are large, and that are not
@pytest.mark.parametrize("wide", [True, False])  # on either kind of processor
def test_the_product(monkeypatch, count, words, product, small, wide):
    """In fp64, which torch multiplies; those of native.c have tests of their own."""
    monkeypatch.setattr(products, "WIDE", wide)
    monkeypatch.setattr(products, "SMALL", small)
    monkeypatch.setattr(products, "SMALL_FOR_SOME", small)
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, 24, generator=generator, dtype=torch.float64)
    matrix = torch.randn(words, 24, generator=generator, dtype=torch.float64)
    found = product(rows, matrix)
    assert found.shape == (count, words)
    torch.testing.assert_close(found, rows @ matrix.T, rtol=1e-12, atol=1e-12)


def test_rows_of_any_strides(wide, monkeypatch):
    monkeypatch.setattr(products, "SMALL", 0)
    torch.manual_seed(0)
    matrix = torch.randn(48, 24)
    product = FewRows(matrix)
    for rows in (torch.randn(24, 2).T, torch.randn(2, 48)[:, ::2], torch.randn(1, 24).as_strided((1, 24), (1, 1), 0)):
        torch.testing.assert_close(product(rows), rows @ matrix.T)
        torch.testing.assert_close(linear(rows, matrix), rows @ matrix.T)


def given(*shape: int) -> list[torch.Tensor]:
    """Rows of a shape, a matrix and a bias for them, from one seed."""
    torch.manual_seed(0)
    return [torch.randn(size).requires_grad_() for size in ((*shape, 24), (32, 24), (32,))]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (0,), (2, 0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_gradients(wide, shape, bias, strided):
    """Also where the gradient that comes is one number for all, and where the rows lie apart."""
    found = []
    for product in (linear, F.linear):
        values = given(*shape)[: 3 if bias else 2]
        rows = torch.cat([values[0], values[0]], dim=-1)[..., ::2] if strided else values[0]
        output = product(rows, *values[1:])
        gradients = torch.autograd.grad(output.sum() + output.square().sum(), values)
        found.append([output, *gradients, *torch.autograd.grad(product(rows, *values[1:]).sum(), values)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)  # fp32 sums of 24 and up to 14 products


def test_only_the_gradients_that_are_wanted(wide):
    for wanted in itertools.product((True, False), repeat=3):
        if any(wanted):
            values = [value.detach().requires_grad_(want) for value, want in zip(given(5), wanted, strict=True)]
            linear(*values).sum().backward()
            assert tuple(value.grad is not None for value in values) == wanted


def test_second_derivatives(wide):
    found = []
    for product in (linear, F.linear):
        rows, matrix, bias = given(5)
        (first,) = torch.autograd.grad(product(rows, matrix, bias).pow(3).sum(), rows, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (rows, matrix)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_derivatives_of_functions(wide):
    """torch.func, as the mean flow asks for it; oneDNN's product knows no tangents, and would lose them silently."""
    rows, matrix, bias = (value.detach() for value in given(5))
    tangent = torch.randn_like(rows)
    with torch.no_grad():
        value, change = torch.func.jvp(lambda x: linear(x, matrix, bias), (rows,), (tangent,))
    torch.testing.assert_close(value, F.linear(rows, matrix, bias))
    torch.testing.assert_close(change, tangent @ matrix.T)


def test_half_the_digits_where_they_are_asked_for(wide):
    rows, matrix, bias = given(5)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(rows, matrix, bias).dtype == torch.bfloat16
    half = [value.detach().bfloat16() for value in (rows, matrix, bias)]
    assert torch.equal(linear(*half), F.linear(*half))


def test_who_multiplies(monkeypatch):
    """The other library only where it was found to be faster."""
    rows, matrix, _ = given(5)
    for wide in (True, False):
        monkeypatch.setattr(products, "WIDE", wide)
        with torch.profiler.profile() as seen:
            linear(rows, matrix)
        assert any(ONE_DNN.__name__ in event.key for event in seen.key_averages()) == wide
