"""`CalmForCausalLM.generate`: generation in the manner of transformers."""

import pytest
import torch

from calm.errors import CalmWarning, ConfigError
from calm.hf import CalmForCausalLM
from tests.generate.conftest import PAD, build_hf_model
from tests.generate.test_engine import generate


@pytest.fixture
def model() -> CalmForCausalLM:
    return build_hf_model(2)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Streamer:
    """Keeps what it gets, in the interface of transformers' streamers."""

    def __init__(self):
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_ragged_prompts(model):
    ids = torch.tensor([[5, 6, 7, 8], [PAD, PAD, 9, 10], [11, PAD, PAD, PAD]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]])
    output = model.generate(ids, mask, max_new_tokens=6, generator=seeded(3))
    assert torch.equal(output[:, :4], ids)
    seeds = torch.randint(2**62, (3,), generator=seeded(3)).tolist()
    expected = generate(model, [[5, 6, 7, 8], [9, 10], [11]], seeds, 6)
    for row, new in zip(output[:, 4:].tolist(), expected, strict=True):
        assert row == new + [PAD] * (len(row) - len(new))
    again = model.generate(ids, mask, max_new_tokens=6, generator=seeded(3))
    assert torch.equal(output, again)


def test_stop_sequences_may_end_inside_a_chunk(model):
    def new_tokens(**options):
        ids = torch.tensor([[5, 6, 7, 8]])
        return model.generate(ids, max_new_tokens=8, eos_token_id=-1, generator=seeded(), **options)[0, 4:].tolist()

    whole = new_tokens()
    assert new_tokens(stop=[whole[3:5]]) == whole[:3]
    assert new_tokens(stop=[[99], whole[:1]]) == []


def test_streamer_gets_the_prompt_and_then_every_chunk(model):
    streamer = Streamer()
    output = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, eos_token_id=-1, streamer=streamer)
    assert [len(piece) for piece in streamer.pieces] == [3, 2, 2, 1]
    assert sum(streamer.pieces, []) == output[0].tolist()
    assert streamer.ended
    with pytest.raises(ConfigError, match="one text"):
        model.generate(torch.ones(2, 3, dtype=torch.long), streamer=streamer)


def test_partial_stop_sequences_are_not_streamed(model):
    ids, options = torch.tensor([[5, 6]]), {"max_new_tokens": 8, "eos_token_id": -1}
    whole = model.generate(ids, generator=seeded(), **options)[0].tolist()
    for stop in (whole[5:8], [whole[5], 39]):  # one crosses a chunk boundary, one is never completed
        streamer = Streamer()
        output = model.generate(ids, generator=seeded(), stop=[stop], streamer=streamer, **options)
        assert sum(streamer.pieces, []) == output[0].tolist()


def test_several_eos_token_ids(model):
    def new_tokens(eos_token_id):
        options = {"max_new_tokens": 8, "generator": seeded()}
        return model.generate(torch.tensor([[5, 6]]), eos_token_id=eos_token_id, **options)[0, 2:].tolist()

    whole = new_tokens(-1)
    assert new_tokens([-1, whole[3]]) == whole[: whole.index(whole[3])]


@pytest.mark.parametrize("method", ["batch", "token"])
def test_too_few_candidates_are_warned_about(model, method):
    options = {"temperature": 0.5, "num_candidates": 1, "method": method, "max_new_tokens": 4}
    with pytest.warns(CalmWarning, match="candidate"):
        model.generate(torch.tensor([[5, 6]]), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1e-10}, "above 0 and at most 1, not 1e-10; .* 0.1"),
        ({"temperature": 0, "method": "exact"}, "above 0 with the method 'exact', not 0"),
        ({"temperature": 1.5}, "at most 1, not 1.5"),
        ({"temperature": float("nan")}, "not nan"),
        ({"temperature": "0.5"}, "at most 1, not 0.5"),
        ({"method": "greedy"}, "method must be one of token"),
        ({"method": "tokens"}, "did you mean token"),
        ({"num_candidates": 0}, "an integer of at least 1, not 0"),
        ({"num_candidates": 2.5}, "an integer of at least 1, not 2.5"),
        ({"max_new_tokens": -5}, "an integer of at least 1, not -5"),
        ({"max_new_tokens": 4.5}, "an integer of at least 1, not 4.5"),
        ({"max_new_tokens": 1000}, "exceed the backbone's 16 positions"),
        ({"top_p": 0.9}, "needs token probabilities"),
        ({"method": "mixture", "top_p": 2}, "top_p must be above 0 and at most 1, not 2"),
        ({"tolerance": 0.1}, "for the method 'batch'"),
        ({"method": "batch", "tolerance": -1}, "from 0 to 1, not -1"),
        ({"num_beams": 4}, "does not support num_beams"),
        ({"do_sample": False}, "always samples"),
        ({"output_logits": True}, "no logits"),
        ({"temprature": 0.5}, "did you mean temperature"),
        ({"stop": [[]]}, "stop sequence must not be empty"),
        ({"stop": "fox"}, "lists of token ids"),
        ({"stop": [5]}, "lists of token ids"),
    ],
)
def test_invalid_arguments(model, options, message):
    with pytest.raises(ConfigError, match=message):
        model.generate(torch.tensor([[5, 6]]), **options)


def test_missing_eos_token_id(model):
    model.config.eos_token_id = None
    with pytest.raises(ConfigError, match="no eos_token_id"):
        model.generate(torch.tensor([[5, 6]]))


def test_invalid_input_shapes(model):
    with pytest.raises(ConfigError, match="shape"):
        model.generate(torch.tensor([5, 6]))
    with pytest.raises(ConfigError, match="attention_mask of shape"):
        model.generate(torch.tensor([[5, 6]]), torch.ones(1, 3))
