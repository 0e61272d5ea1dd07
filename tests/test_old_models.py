"""Model directories written by version 0.1.0.dev0 load, and compute what that version computed.

`old_models/` holds tiny models of every head with random weights, and `expected.json` the numbers and texts that the
old version computed with them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from calm.checkpoint import load_autoencoder, load_calm, load_language_model, load_transformer
from calm.evaluate.estimators import estimator_of
from calm.generate.engine import Engine, Sequence
from calm.generate.sampler import SamplingParams
from calm.hf import CalmForCausalLM, ChunkAutoencoder
from calm.noise import RowNoise

MODELS = Path(__file__).parent / "old_models"
EXPECTED = json.loads((MODELS / "expected.json").read_text())
CALM_MODELS = [name for name in EXPECTED if name not in ("transformer", "autoencoder")]
TOKENS = torch.randint(3, 48, (2, 16), generator=torch.Generator().manual_seed(3))
EOS, PAD = 1, 2


def assert_close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Absolute error for numbers up to 1, relative error above."""
    found, expected = (torch.as_tensor(value, dtype=torch.double) for value in (found, expected))
    assert found.shape == expected.shape
    assert bool(found.isfinite().all())
    assert float(((found - expected).abs() / (1 + expected.abs())).max()) < tolerance


def noise() -> RowNoise:
    return RowNoise([5, 6])


def padding_mask() -> torch.Tensor:
    mask = torch.ones_like(TOKENS)
    mask[0, 10:] = 0
    return mask


def chunks_of(model: Any) -> torch.Tensor:
    return TOKENS.unflatten(1, (-1, model.chunk_size))


def generate(model: Any, params: SamplingParams) -> list[list[int]]:
    """Two sequences, of which the second is added one step later."""
    engine = Engine(model, EOS, PAD)
    first, second = Sequence([3, 5, 7, 9, 11], 11, 12, params), Sequence([4, 6, 8], 12, 12, params)
    engine.add([first])
    engine.step()
    engine.add([second])
    while engine.waiting or engine.running:
        engine.step()
    return [first.output_ids, second.output_ids]


def test_every_model_has_expected_values():
    assert {path.name for path in MODELS.iterdir() if path.is_dir()} == set(EXPECTED)


@pytest.mark.parametrize("name", CALM_MODELS)
def test_loss_and_gradient(name):
    model = load_calm(MODELS / name).train()
    loss = model(chunks_of(model), noise=noise())["loss"]
    loss.backward()
    gradient_norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert_close(loss.item(), EXPECTED[name]["loss"])
    assert_close(torch.stack(gradient_norms).norm().item(), EXPECTED[name]["gradient_norm"], 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", CALM_MODELS)
def test_hidden_states(name):
    model = load_calm(MODELS / name)
    assert_close(model.hidden_states(chunks_of(model)).flatten()[:8].tolist(), EXPECTED[name]["hidden"])


@torch.no_grad()
@pytest.mark.parametrize("name", CALM_MODELS)
def test_loss_of_auto_model_for_causal_lm(name):
    model = AutoModelForCausalLM.from_pretrained(MODELS / name)
    assert type(model) is CalmForCausalLM
    loss = model.train()(input_ids=TOKENS, labels=TOKENS, noise=noise()).loss
    assert_close(loss.item(), EXPECTED[name]["loss"])
    masked = model.eval()(input_ids=TOKENS, labels=TOKENS, attention_mask=padding_mask(), noise=noise()).loss
    assert_close(masked.item(), EXPECTED[name]["masked_loss"])


@torch.no_grad()
@pytest.mark.parametrize("name", CALM_MODELS)
def test_masked_loss(name):
    """As `CalmForCausalLM` calls the plain model: a chunk counts if it and the chunk before it are no padding."""
    model = load_calm(MODELS / name)
    mask = padding_mask().unflatten(1, (-1, model.chunk_size)).any(-1).float()
    targets = mask.clone()
    targets[:, 1:] *= mask[:, :-1]
    assert_close(model(chunks_of(model), targets, mask, noise())["loss"].item(), EXPECTED[name]["masked_loss"])


@torch.no_grad()
@pytest.mark.parametrize("name", [*CALM_MODELS, "transformer"])
def test_brier_estimates(name):
    estimator = estimator_of(load_language_model(MODELS / name), 8, 6, 4)
    estimates = estimator.estimate(TOKENS[:, :12], RowNoise([1, 2]))
    for field, value in zip(("accuracy", "collision", "nats"), estimates, strict=True):
        assert_close(value.double().mean(0).tolist(), EXPECTED[name][field])


@pytest.mark.parametrize("cpu_backend", ["1", "0"], ids=["cpu-backend", "torch"])
@pytest.mark.parametrize("name", [*CALM_MODELS, "transformer"])
def test_generated_tokens(name, cpu_backend, monkeypatch):
    monkeypatch.setenv("CALM_CPU", cpu_backend)
    model = load_language_model(MODELS / name)
    assert EXPECTED[name]["texts"]
    for params, expected in EXPECTED[name]["texts"].items():
        assert generate(model, SamplingParams(**json.loads(params))) == expected, params


@torch.no_grad()
def test_transformer_loss():
    model = load_transformer(MODELS / "transformer")
    assert_close(model(TOKENS[..., None])["loss"].item(), EXPECTED["transformer"]["loss"])


@torch.no_grad()
def test_autoencoder():
    expected = EXPECTED["autoencoder"]
    model = load_autoencoder(MODELS / "autoencoder").train()
    output = model(TOKENS.unflatten(1, (-1, 2)), noise=noise())
    hf = AutoModel.from_pretrained(MODELS / "autoencoder")
    assert type(hf) is ChunkAutoencoder
    hf_output = hf.train()(input_ids=TOKENS, noise=noise())
    for field in ("loss", "reconstruction", "kl"):
        assert_close(output[field].item(), expected[field])
        assert_close(hf_output[field].item(), expected[field])
    model.eval()
    assert model.tokens(model.encode(TOKENS.view(2, 8, 2)).mean).tolist() == expected["tokens"]


def test_renamed_config_fields():
    """`own_words` and `knows_fill` of old config.json files are `untied_lm_head` and `front_padding` now."""
    old = json.loads((MODELS / "chain-own-words" / "config.json").read_text())
    assert old["own_words"]
    assert old["knows_fill"]
    for model in (load_calm(MODELS / "chain-own-words"), CalmForCausalLM.from_pretrained(MODELS / "chain-own-words")):
        assert model.config.untied_lm_head
        assert model.config.front_padding
        assert model.head.lm_head is not None
        assert not hasattr(model.config, "own_words")
        assert not hasattr(model.config, "knows_fill")


def test_renamed_front_padding(tmp_path):
    shutil.copytree(MODELS / "energy", tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "knows_fill": False}))
    assert not load_calm(tmp_path).front_padding
    assert not CalmForCausalLM.from_pretrained(tmp_path).front_padding
