"""native.c: its products, and what happens where it cannot be compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from calm import native

ASK = "from calm import native; print(native.library() is not None)"


def asked(cache: Path, **variables: str) -> subprocess.Popen:
    """A process that compiles, or does not."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", native.SWITCH)}
    environment |= {"XDG_CACHE_HOME": str(cache)} | variables
    return subprocess.Popen([sys.executable, "-c", ASK], env=environment, stdout=-1, stderr=-1, text=True)


def answer(process: subprocess.Popen) -> bool:
    told, complaints = process.communicate(timeout=120)
    assert (process.returncode, complaints) == (0, "")
    return told.strip() == "True"


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (33, 64), (300, 129)])  # one thread for the small ones
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_products(monkeypatch, count, shape, bias, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    matrix, added = torch.randn(shape), torch.randn(shape[0])
    for rows in (torch.randn(count, shape[1]), torch.randn(shape[1], count).T):
        found = native.product(rows, matrix, added if bias else None)
        expected = rows.double() @ matrix.double().T + (added if bias else 0)
        # a sum of d products in fp32, whatever its order
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("compiler")
def test_numbers_that_are_none_stay_so():
    matrix = torch.ones(3, 40)
    matrix[1, 7], matrix[2, 0] = torch.nan, torch.inf
    found = native.product(torch.ones(1, 40), matrix)[0]
    assert found[0] == 40
    assert found[1].isnan()
    assert found[2] == torch.inf


def test_what_it_takes():
    matrix = torch.randn(4, 6)
    assert native.takes(matrix) == (native.library() is not None)
    for other in (matrix.T, matrix.double(), matrix.bfloat16(), matrix.to("meta")):
        assert not native.takes(matrix, other)


@pytest.mark.usefixtures("compiler")
def test_it_is_compiled_once_by_however_many(tmp_path):
    at_once = [asked(tmp_path) for _ in range(3)]
    assert [answer(process) for process in at_once] == [True] * 3
    (file,) = (tmp_path / "calm").iterdir()
    made = file.stat().st_mtime_ns
    assert answer(asked(tmp_path, PATH=""))  # now it needs no compiler
    assert file.stat().st_mtime_ns == made


def test_without_a_compiler(tmp_path):
    without = ({"PATH": ""}, {"CC": "/no/such"}, {"CC": "false"}, {"CC": "'"}, {native.SWITCH: "0"})
    for number, variables in enumerate(without):
        cache = tmp_path / str(number)
        assert not answer(asked(cache, **variables))
        assert not list(cache.glob("calm/*"))


@pytest.mark.usefixtures("compiler")
def test_without_a_place_for_it(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert not answer(asked(file))


@pytest.mark.usefixtures("compiler")
def test_a_damaged_library(tmp_path):
    assert answer(asked(tmp_path))
    (file,) = (tmp_path / "calm").iterdir()
    file.write_bytes(b"not a library")
    assert not answer(asked(tmp_path))
