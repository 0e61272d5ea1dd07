"""Matrices in eight bits: nearly the same numbers, the same interface."""

from pathlib import Path

import pytest
import torch

from calm.errors import UserError
from calm.linear import prepare_for_writing
from calm.models.directories import located
from calm.models.int8 import to_int8
from calm.models.loading import load_calm, load_softmax
from calm.sampling.next_chunk import Sampling
from calm.sampling.text import Writer


def test_hidden_states_stay_close():
    plain, small = (load_calm(located(Path("bundled"))).eval() for _ in range(2))
    to_int8(small)
    ids = torch.randint(3, plain.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, rounded = plain.hidden_states(ids), small.hidden_states(ids)
    assert not torch.equal(exact, rounded)
    # steps of 1/127 of a range, for weights and for what meets them, through four layers: a few in a hundred
    assert (exact - rounded).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("load", [load_calm, load_softmax])
def test_matrices_are_a_quarter_as_long(models, load):
    model = load(models / ("calm-2" if load is load_calm else "softmax"))
    prepare_for_writing(model)  # it has written before
    before = sum(p.numel() for p in model.parameters())
    to_int8(model)
    assert sum(p.numel() for p in model.parameters()) < before  # what is left are words and norms


def test_text_is_written_from_them():
    writer = Writer(located(Path("bundled")), int8=True)
    prompt = writer.tokenizer.encode("And God said")
    pieces = list(writer.write([prompt], writer.predictor.resolve(Sampling(0.5)), max_new_tokens=8))
    assert sum(len(piece.ids) for piece in pieces) == 8


def test_elsewhere_it_is_refused(models):
    model = load_calm(models / "calm-2").to("meta")
    with pytest.raises(UserError, match="int8 is for CPUs, and the model is on meta"):
        to_int8(model)
