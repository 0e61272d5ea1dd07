"""A model that was read without transformers writes what the library's own writes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from calm.errors import UserError
from calm.models.directories import located
from calm.models.int8 import to_int8
from calm.models.loading import load_calm, load_writing
from calm.models.plain import read_plain
from calm.sampling.batch import Batch, Text
from calm.sampling.next_chunk import Sampling
from calm.sampling.predictor import CalmPredictor
from calm.sampling.text import Writer
from tests.sampling.conftest import BACKBONE, END, FILL, make

WAYS = [Sampling(), Sampling(0.5, 20, "token"), Sampling(0.7, 5, "mixture")]


def texts_of(model, ways: list[Sampling]) -> list[list[int]]:
    """Of prompts of several lengths, in one batch."""
    batch = Batch(CalmPredictor(model), END, FILL)
    prompts = ([], [5], [7, 8, 9, 10, 11], [12] * 9)
    texts = [Text(list(prompt), seed, 8, way) for way in ways for seed, prompt in enumerate(prompts)]
    batch.join(texts)
    while batch.joining or batch.texts:
        batch.step()
    return [text.new for text in texts]


@pytest.mark.parametrize(
    "fields",
    [
        *({"head": head} for head in ("energy", "flow", "mean-flow", "diffusion", "chain")),
        *({"model_input": given} for given in ("continuous", "both")),
        {"head": "chain", "own_words": True},
        {"knows_fill": False},
        {"backbone": BACKBONE | {"num_key_value_heads": 1, "head_dim": 12, "attention_bias": True, "mlp_bias": True}},
        {"backbone": BACKBONE | {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}},
    ],
)
def test_texts_are_those_of_the_librarys_model(tmp_path, fields):
    model = make(2, **fields)
    for name, weight in model.backbone.named_parameters():
        if "norm" in name or "bias" in name:  # they begin as ones and zeros, which would hide whose they are
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    model.save_pretrained(tmp_path)
    plain, whole = read_plain(tmp_path), load_calm(tmp_path).eval()
    assert plain is not None
    assert {name: tuple(p.shape) for name, p in plain.named_parameters()} == {
        name: tuple(p.shape) for name, p in whole.named_parameters()
    }
    assert not plain.training
    assert not any(weight.requires_grad for weight in plain.parameters())
    assert texts_of(plain, WAYS) == texts_of(whole, WAYS)


def test_in_eight_bits(tmp_path):
    make(2).save_pretrained(tmp_path)
    models = read_plain(tmp_path), load_calm(tmp_path).eval()
    for model in models:
        to_int8(model)
    plain, whole = (texts_of(model, [Sampling()]) for model in models)
    assert plain == whole


@pytest.mark.parametrize(
    "backbone",
    [
        BACKBONE | {"model_type": "qwen2"},
        BACKBONE | {"hidden_act": "gelu"},
        BACKBONE | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ],
)
def test_other_backbones_are_left_to_transformers(tmp_path, backbone):
    make(2, backbone).save_pretrained(tmp_path)
    assert read_plain(tmp_path) is None
    assert load_writing(tmp_path).config.backbone_config.model_type == backbone.get("model_type", "llama")


def without_a_weight(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["backbone.layers.1.mlp.down_proj.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def cut_short(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def other_sizes(directory: Path) -> None:
    fields = json.loads((directory / "config.json").read_text())
    fields["backbone_config"]["intermediate_size"] += 8
    (directory / "config.json").write_text(json.dumps(fields))


def no_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def unknown_head(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head": "tail"}))


@pytest.mark.parametrize("damage", [without_a_weight, cut_short, other_sizes, no_config, unknown_head])
def test_what_is_wrong_with_a_directory_is_said_as_ever(tmp_path, damage):
    make(2).save_pretrained(tmp_path)
    damage(tmp_path)
    assert read_plain(tmp_path) is None
    with pytest.raises(UserError):
        Writer(tmp_path)


def test_the_bundled_model_is_read_plainly():
    writer = Writer(located(Path("bundled")))
    assert type(writer.model).__name__ == "PlainCalm"
    assert type(Writer(located(Path("bundled")), plain=False).model).__name__ == "CalmForCausalLM"
