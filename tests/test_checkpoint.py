"""Model directories: models read without transformers equal those of transformers; errors of broken directories."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from calm import cpu
from calm.checkpoint import load_calm, load_language_model, read_weights, resolve_model_dir, save_model
from calm.data.tokenizer import load_tokenizer
from calm.errors import UserError
from calm.generate.engine import Engine, Sequence
from calm.generate.sampler import SamplingParams
from calm.generate.text import TextGenerator
from calm.hf import CalmForCausalLM, HFBackbone
from calm.llama import Llama
from calm.model import Calm, PlainCalmConfig
from tests.generate.conftest import BACKBONE, EOS, GPT2, PAD, build_hf_model

PARAMS = [SamplingParams(), SamplingParams(0.5, 20, "token"), SamplingParams(0.7, 5, "mixture")]
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}


def generate(model: Any, all_params: list[SamplingParams]) -> list[list[int]]:
    """Outputs for prompts of several lengths, in one batch."""
    engine, prompts = Engine(model, EOS, PAD), ([], [5], [7, 8, 9, 10, 11], [12] * 9)
    sequences = [Sequence(list(prompt), seed, 8, p) for p in all_params for seed, prompt in enumerate(prompts)]
    engine.add(sequences)
    while engine.waiting or engine.running:
        engine.step()
    return [sequence.output_ids for sequence in sequences]


def load_with_transformers_backbone(directory: Path) -> Calm:
    """The model of a directory on transformers' own Llama."""
    fields = json.loads((directory / "config.json").read_text())
    backbone_fields = fields["backbone_config"]
    config = AutoConfig.for_model(**backbone_fields)
    backbone = HFBackbone(AutoModel.from_config(config))
    model = Calm(PlainCalmConfig(**{**fields, "backbone_config": config}), backbone)
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model.eval()


def shapes(model: torch.nn.Module) -> dict[str, Any]:
    return {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "fields",
    [
        *({"head": head} for head in ("energy", "flow", "mean-flow", "diffusion", "chain", "probit")),
        *({"model_input": kind} for kind in ("continuous", "both")),
        {"head": "chain", "untied_lm_head": True},
        {"head": "probit", "untied_lm_head": True},
        {"front_padding": False},
        {"backbone": BACKBONE | {"num_key_value_heads": 1, "head_dim": 12, "attention_bias": True, "mlp_bias": True}},
        {"backbone": BACKBONE | {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}},
        {"backbone": BACKBONE | {"rope_parameters": LINEAR_ROPE}},
        {"backbone": BACKBONE | {"rope_parameters": LLAMA3_ROPE}},
    ],
    ids=lambda fields: "-".join(str(v) if k != "backbone" else "backbone" for k, v in fields.items()),
)
def test_plain_models_equal_those_of_transformers(tmp_path, fields):
    model = build_hf_model(2, **fields)
    for name, weight in model.backbone.named_parameters():
        if "norm" in name or "bias" in name:  # initialized to ones and zeros, which would hide mix-ups
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    model.save_pretrained(tmp_path)
    plain, hf = load_calm(tmp_path), CalmForCausalLM.from_pretrained(tmp_path).eval()
    reference = load_with_transformers_backbone(tmp_path)
    assert type(plain) is Calm
    assert type(plain.backbone) is Llama
    assert not plain.training
    assert shapes(plain) == shapes(hf) == shapes(reference)
    chunks = torch.randint(2, 40, (2, 8, 2), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = plain.hidden_states(chunks)
        assert torch.equal(hidden, hf.hidden_states(chunks))
        torch.testing.assert_close(hidden, reference.hidden_states(chunks), rtol=1e-4, atol=1e-5)
    assert generate(plain, PARAMS) == generate(hf, PARAMS) == generate(reference, PARAMS)


def test_autoencoder_is_loaded_frozen(tmp_path):
    build_hf_model(2).save_pretrained(tmp_path)
    model = load_calm(tmp_path)
    frozen = {name.split(".")[0] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"autoencoder"}
    assert not any(p.requires_grad for p in model.autoencoder.parameters())


def test_int8(tmp_path):
    build_hf_model(2).save_pretrained(tmp_path)
    plain, hf = load_calm(tmp_path), CalmForCausalLM.from_pretrained(tmp_path).eval()
    for model in (plain, hf):
        cpu.optimize(model, int8=True)
    assert generate(plain, [SamplingParams()]) == generate(hf, [SamplingParams()])


@pytest.mark.parametrize(
    "backbone",
    [BACKBONE | {"model_type": "qwen2", "num_key_value_heads": 2}, BACKBONE | {"hidden_act": "gelu"}],
    ids=["qwen2", "gelu"],
)
def test_other_backbones_come_from_transformers(tmp_path, backbone):
    model = build_hf_model(2, backbone)
    model.save_pretrained(tmp_path)
    loaded = load_language_model(tmp_path)
    assert type(loaded) is Calm
    assert type(loaded.backbone) is HFBackbone
    assert loaded.config.backbone_config.model_type == backbone.get("model_type", "llama")
    assert generate(loaded, PARAMS) == generate(model, PARAMS)


def test_saved_plain_models_load_in_both_forms(tmp_path):
    build_hf_model(2).save_pretrained(tmp_path / "hf")
    plain = load_calm(tmp_path / "hf")
    save_model(plain, tmp_path / "plain")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(hf) is CalmForCausalLM
    for again in (load_calm(tmp_path / "plain"), hf):
        state = again.state_dict()
        assert state.keys() == plain.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def remove_weight(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["backbone.layers.1.mlp.down_proj.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def add_weight(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    save_file({**weights, "extra.weight": torch.ones(1)}, directory / "model.safetensors", {"format": "pt"})


def truncate_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def delete_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def change_size(directory: Path) -> None:
    fields = json.loads((directory / "config.json").read_text())
    fields["backbone_config"]["intermediate_size"] += 8
    (directory / "config.json").write_text(json.dumps(fields))


def change_head(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head": "tail"}))


def remove_config_field(directory: Path) -> None:
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    del fields["autoencoder_config"]
    path.write_text(json.dumps(fields))


def truncate_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def set_nan(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["backbone.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def set_infinity(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["backbone.norm.weight"][0] = -torch.inf
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def many_layers(part: str | None, name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        fields = json.loads((directory / "config.json").read_text())
        (fields[part] if part else fields)[name] = 10**8
        (directory / "config.json").write_text(json.dumps(fields))

    return change


def shard_elsewhere(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory.parent / "secret.safetensors")
    index = {"metadata": {}, "weight_map": {"backbone.norm.weight": "../secret.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def list_of_shards(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (set_nan, "are not finite: backbone.layers.1.mlp.down_proj.weight has NaN or infinite values; use another"),
        (set_infinity, "are not finite: backbone.norm.weight has NaN or infinite values"),
        (many_layers("backbone_config", "num_hidden_layers"), "num_hidden_layers is 100,000,000, but there are"),
        (many_layers("autoencoder_config", "num_decoder_layers"), "num_decoder_layers is 100,000,000, but there are"),
        (many_layers(None, "num_head_layers"), "num_head_layers is 100,000,000, but there are"),
        (shard_elsewhere, r"should name files in its directory, not '\.\./secret.safetensors'"),
        (list_of_shards, r"should name files in its directory, not \['model.safetensors'\]"),
        (remove_weight, "do not fit their config.json: backbone.layers.1.mlp.down_proj.weight$"),
        (add_weight, "do not fit their config.json: extra.weight$"),
        (truncate_weights, "model.safetensors cannot be read"),
        (delete_weights, "holds no weights"),
        (change_size, "do not fit their config.json: backbone.layers.0.mlp.gate_proj.weight"),
        (change_head, "cannot be read: head must be one of .*, not 'tail'"),
        (remove_config_field, "cannot be read: .*autoencoder_config"),
        (truncate_config, "cannot be read: config.json"),
    ],
)
def test_broken_directories_are_described_in_one_line(tmp_path, damage, message):
    tmp_path /= "model"
    build_hf_model(2).save_pretrained(tmp_path)
    damage(tmp_path)
    for load in (load_calm, load_language_model, TextGenerator):
        with pytest.raises(UserError, match=message) as caught:
            load(tmp_path)
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_other_transformers_are_checked_before_they_are_built(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2, vocab_size=40))
    model.save_pretrained(tmp_path / "nan")
    weights = load_file(tmp_path / "nan" / "model.safetensors")
    weights["transformer.h.1.ln_1.bias"][0] = torch.nan
    save_file(weights, tmp_path / "nan" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"are not finite: transformer.h.1.ln_1.bias has NaN"):
        load_language_model(tmp_path / "nan")
    model.save_pretrained(tmp_path / "layers")
    many_layers(None, "n_layer")(tmp_path / "layers")
    with pytest.raises(UserError, match="n_layer is 100,000,000, but there are"):
        load_language_model(tmp_path / "layers")
    model.save_pretrained(tmp_path / "index")
    shard_elsewhere(tmp_path / "index")
    with pytest.raises(UserError, match="should name files in its directory"):
        load_language_model(tmp_path / "index")


def test_large_finite_weights_are_loaded(tmp_path):
    """Their sum is infinite in fp32."""
    build_hf_model(2).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["backbone.norm.weight"].fill_(3e38)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_calm(tmp_path).backbone.norm.weight.min() > 1e38


def test_code_in_a_directory_is_not_executed(tmp_path, monkeypatch, capsys):
    """Without a question to the user, whose answer here would be yes."""
    directory, marker = tmp_path / "model", tmp_path / "executed"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2, vocab_size=40)).save_pretrained(directory)
    auto_map = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": ["code.T", None]}
    fields = json.loads((directory / "config.json").read_text()) | {"model_type": "another", "auto_map": auto_map}
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (directory / "code.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    for load, name in ((load_language_model, directory), (load_tokenizer, str(directory))):
        with pytest.raises(UserError, match="contains custom code"):
            load(name)
    assert "[y/N]" not in capsys.readouterr().out
    assert not marker.exists()


def test_pickled_weights_are_read_without_executing_code(tmp_path):
    model = build_hf_model(2)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert generate(load_calm(tmp_path), PARAMS) == generate(model, PARAMS)
    torch.save({"weight": Path("code")}, tmp_path / "pytorch_model.bin")  # any object but a tensor
    with pytest.raises(UserError, match="pytorch_model.bin cannot be read"):
        read_weights(tmp_path)


def test_bundled_model_loads_in_both_forms():
    directory = resolve_model_dir(Path("bundled"))
    assert type(TextGenerator(directory).model) is Calm
    assert type(AutoModelForCausalLM.from_pretrained(directory)) is CalmForCausalLM
