"""A step through a Llama against transformers' own forward pass."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, LlamaConfig, LlamaModel, Qwen2Config

from calm import native
from calm.models.directories import located
from calm.models.int8 import to_int8
from calm.sampling.llama_step import LlamaStep, NormStep, takes_steps
from calm.sampling.predictor import LastStates
from calm.sampling.text import Writer


@pytest.fixture(params=["compiled", "by torch"], autouse=True)
def ways(request, monkeypatch):
    """Everything holds with native.c, by two threads, and where there is no compiler for it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    if request.param == "by torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C compiler")
    return request.param


SIZES = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
STRETCHED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # fp32, three layers, sums in another order


def llama(**fields) -> LlamaModel:
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**(SIZES | fields))).eval()
    for name, weight in model.named_parameters():  # norms begin as ones, which would hide whose weight is whose
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    return model


def texts(rows: int, length: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is read, which places are there (each text begins one later than the text before), and their positions."""
    there = torch.arange(length) >= torch.arange(rows)[:, None]
    embedded = torch.randn(rows, length, SIZES["hidden_size"], generator=torch.Generator().manual_seed(rows))
    return embedded, there, (there.long().cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def assert_same_states(ours, plain: LlamaModel, rows: int, read: int = 2, **tolerance) -> None:
    """`ours` reads some places at once and the others step by step, `plain` everything at once, for each of them."""
    embedded, there, positions = texts(rows)
    cache = ours.cache()
    for first, last in [(0, read), *((k, k + 1) for k in range(read, embedded.shape[1]))]:
        found = ours(embedded[:, first:last], there[:, :last], positions[:, first:last], cache)
        mask, places = there[:, :last].long(), positions[:, :last]
        whole = plain(inputs_embeds=embedded[:, :last], attention_mask=mask, position_ids=places, use_cache=False)
        shown = there[:, last - 1]  # a text that has not begun yet has no state
        expected = whole.last_hidden_state[:, -1]
        torch.testing.assert_close(found[shown], expected[shown], **(tolerance or TOLERANCE))
        assert cache.get_seq_length() == last


@pytest.mark.parametrize("rows", [1, 3, 5])  # the last are no longer few
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 2},  # shared by pairs of heads
        {"num_key_value_heads": 1, "head_dim": 12},
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_act": "gelu", "rms_norm_eps": 0.1},
        {"rope_parameters": STRETCHED},
    ],
)
def test_states_are_those_of_transformers(rows, fields, ways):
    model = llama(**fields)
    reads = LastStates(model)
    assert reads.step is not None
    plain = "hidden_act" not in fields and "mlp_bias" not in fields
    assert (reads.step.native is not None) == (plain and ways == "compiled")
    assert_same_states(reads, copy.deepcopy(model), rows)


@torch.no_grad()
def test_long_texts(ways):
    """Beyond the room that keys and values began with, and with products that overflow a softmax without a maximum."""
    model = llama(num_key_value_heads=2, max_position_embeddings=256)
    model.layers[0].self_attn.q_proj.weight.mul_(20)
    reads, length = LastStates(model), 100
    embedded = torch.randn(1, length, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    there, positions, cache = torch.ones(1, length, dtype=torch.bool), torch.arange(length)[None], reads.cache()
    for last in range(1, length + 1):
        found = reads(embedded[:, last - 1 : last], there[:, :last], positions[:, last - 1 : last], cache)
    expected = model(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)  # sharp attention makes more of a last digit


@torch.no_grad()
def test_matrices_that_are_taken_away_stay_readable():
    """A step that was made before goes on with what it knew, as its products do."""
    model = llama()
    reads, plain = LastStates(model), copy.deepcopy(model)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data = torch.full_like(weight, torch.nan)
    assert_same_states(reads, plain, rows=1)


@pytest.mark.parametrize("read", [1, 6])
@pytest.mark.parametrize("rows", [1, 2])
def test_texts_of_one_position_and_prompts_alone(rows, read):
    model = llama()
    assert_same_states(LastStates(model), copy.deepcopy(model), rows, read)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
def test_several_positions_behind_a_cache(rows):
    model = llama()
    embedded, there, positions = texts(rows)
    reads = LastStates(model)
    cache = reads.cache()
    for first, last in [(0, 3), (3, 5), (5, 6)]:
        found = reads(embedded[:, first:last], there[:, :last], positions[:, first:last], cache)
    whole = model(inputs_embeds=embedded, attention_mask=there.long(), position_ids=positions, use_cache=False)
    torch.testing.assert_close(found, whole.last_hidden_state[:, -1], **TOLERANCE)


def test_weights_that_train_go_on_are_seen():
    model = llama()
    reads = LastStates(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    assert_same_states(reads, copy.deepcopy(model), rows=2)


def test_in_other_numbers():
    """Weights that were moved are taken where they are now, also when a step was made for them before."""
    model = llama()
    LlamaStep(model)
    model.bfloat16()
    reads = LastStates(model)
    embedded, there, positions = texts(1)
    cache = reads.cache()
    with torch.no_grad():
        reads(embedded[:, :5].bfloat16(), there[:, :5], positions[:, :5], cache)
        found = reads(embedded[:, 5:].bfloat16(), there, positions[:, 5:], cache)
        expected = model(inputs_embeds=embedded.bfloat16(), position_ids=positions).last_hidden_state[:, -1]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)  # bf16 has three digits


def test_a_norm_in_few_digits_is_that_of_many():
    """Rounded once, at the end: the library's own norm, computed in fp32."""
    torch.manual_seed(0)
    norm = llama().norm
    torch.nn.init.normal_(norm.weight, mean=1.0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        rows = (torch.randn(5, SIZES["hidden_size"]) * torch.tensor([[1e-4], [0.01], [1.0], [10.0], [0.0]])).to(dtype)
        norm.to(dtype)
        with torch.no_grad():
            found, expected = NormStep(norm)(rows), norm(rows)
        assert found.dtype == dtype
        digit = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-6  # which transformers computes in fp32, too
        torch.testing.assert_close(found, expected, rtol=2 * digit, atol=1e-7)


def test_in_eight_bits():
    """The layers are others then, and called one by one; one row, as all rows of a batch share a scale."""
    model = llama()
    to_int8(model)
    reads = LastStates(model)
    assert reads.step is not None
    embedded, there, positions = texts(1)
    library = LastStates(model)
    library.step = None
    caches = reads.cache(), library.cache()
    with torch.no_grad():
        for cache, way in zip(caches, (reads, library), strict=True):
            way(embedded[:, :5], there[:, :5], positions[:, :5], cache)
        found, expected = (
            way(embedded[:, 5:], there, positions[:, 5:], cache)
            for cache, way in zip(caches, (reads, library), strict=True)
        )
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)  # a last digit may round the other way


def other_backbone():
    return AutoModel.from_config(Qwen2Config(**SIZES)).eval()


def hooked():
    model = llama()
    model.layers[1].register_forward_pre_hook(lambda *_: None)
    return model


def replaced():
    model = llama()
    model.layers[2].forward = model.layers[2].forward  # as libraries do that move weights between devices
    return model


@pytest.mark.parametrize(
    "make", [other_backbone, hooked, replaced, lambda: llama().train(), lambda: llama(attn_implementation="eager")]
)
def test_who_does_not_take_steps(make):
    assert not takes_steps(make())


def test_a_model_is_saved_and_loaded_as_before(tmp_path):
    """Weights that lie one behind the other are files of their own."""
    model, plain = llama(), llama()
    LlamaStep(model)
    model.save_pretrained(tmp_path)
    loaded = LlamaModel.from_pretrained(tmp_path)
    assert list(loaded.state_dict()) == list(plain.state_dict())
    for name, weight in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_a_writer_in_eight_bits_takes_steps_in_eight_bits():
    writer = Writer(located(Path("bundled")), int8=True)
    step: Any = writer.predictor.last_states.step  # pyright: ignore[reportAttributeAccessIssue]
    part, rows = step.layers[0], torch.randn(1, writer.model.config.hidden_size)
    with torch.no_grad():
        one_by_one = [layer(rows) for layer in (part.attention.q_proj, part.attention.k_proj, part.attention.v_proj)]
        assert torch.equal(part.project(rows), torch.cat(one_by_one, dim=-1))
