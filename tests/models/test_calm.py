"""The language model: any backbone, one directory, a frozen autoencoder, caches, and the habits of transformers."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache, Trainer, TrainingArguments

import calm  # noqa: F401
from calm.errors import CalmWarning, ConfigError, UserError
from calm.models.calm import IGNORED, CalmForCausalLM
from calm.models.configuration import CalmConfig
from calm.models.loading import load_autoencoder, load_calm
from calm.noise import RowNoise

AUTOENCODER = {"vocab_size": 60, "chunk_size": 4, "latent_size": 8, "hidden_size": 16, "intermediate_size": 24}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
BACKBONES = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gpt_neox": {},
    "mistral": {"num_key_value_heads": 2},
}


def model(kind="llama", chunk_size=4, **fields) -> CalmForCausalLM:
    torch.manual_seed(0)
    backbone = {"model_type": kind, **SMALL, **BACKBONES[kind]}
    made = CalmForCausalLM(CalmConfig(backbone, {**AUTOENCODER, "chunk_size": chunk_size}, **fields))
    torch.nn.init.normal_(made.autoencoder.encoder.posterior.weight, std=0.3)  # latents that differ
    return made


def ids(rows=2, chunks=6, chunk_size=4) -> torch.Tensor:
    return torch.randint(60, (rows, chunks * chunk_size), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize(
    ("head", "model_input"), [("energy", "discrete"), ("flow", "continuous"), ("diffusion", "both")]
)
def test_any_backbone_in_one_directory(kind, head, model_input, tmp_path):
    made = model(kind, head=head, model_input=model_input)
    made.train()
    loss = made(ids(), labels=ids(), noise=RowNoise([1, 2])).loss
    loss.backward()
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in made.named_parameters() if p.grad is not None}
    assert not any(name.startswith("autoencoder") for name in trained)
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is CalmForCausalLM
    for (name, one), (other_name, other) in zip(made.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name
    loaded.train()
    assert torch.equal(loss, loaded(ids(), labels=ids(), noise=RowNoise([1, 2])).loss)
    card = (tmp_path / "README.md").read_text()
    assert "one vector of 8 numbers for every 4 tokens" in card
    assert json.loads((tmp_path / "config.json").read_text())["head"] == head


@pytest.mark.parametrize("chunk_size", [1, 2, 8])
def test_any_chunk_size(chunk_size):
    made = model(chunk_size=chunk_size)
    given = ids(chunk_size=chunk_size)
    assert made.hidden_states(given).shape == (2, 6, 32)
    latents, tokens = made.predict(given, 3)
    assert latents.shape == (3, 2, 6, 8)
    assert tokens.shape == (3, 2, 6, chunk_size)
    assert made(given, labels=given).loss.isfinite()


def test_the_autoencoder_is_frozen_whatever_happens(tmp_path):
    made = model()
    before = {name: value.clone() for name, value in made.autoencoder.state_dict().items()}
    made.save_pretrained(tmp_path)
    for changed in (made, CalmForCausalLM.from_pretrained(tmp_path), load_calm(tmp_path)):
        changed.requires_grad_(True)
        changed.train()
        assert not changed.autoencoder.training
        assert all(not module.training for module in changed.autoencoder.modules())
        assert not any(p.requires_grad for p in changed.autoencoder.parameters())
        optimizer = torch.optim.AdamW(changed.parameters(), lr=1e-2, weight_decay=0.5)
        for _ in range(100):
            changed(ids(), labels=ids()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in changed.autoencoder.state_dict().items():
            assert torch.equal(value, before[name]), name


def test_a_position_sees_the_chunks_before_it_and_no_other():
    made = model().eval()
    given = ids()
    changed = given.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 60
    one, other = made.hidden_states(given), made.hidden_states(changed)
    torch.testing.assert_close(one[:, :3], other[:, :3])
    assert (one[:, 3:] - other[:, 3:]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("static", [False, True])
def test_decoding_with_a_cache_is_the_full_pass(kind, static):
    made = model(kind).eval()
    given = ids(chunks=9)
    with torch.no_grad():
        full = made.hidden_states(given)
        config = made.config.backbone_config
        cache = StaticCache(config=config, max_cache_len=16) if static else DynamicCache(config=config)
        pieces = [made.hidden_states(given[:, :16], past_key_values=cache)]  # a prompt of four chunks
        pieces += [made.hidden_states(given[:, start : start + 4], past_key_values=cache) for start in range(16, 36, 4)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=0, atol=1e-5)


def test_padding_on_the_left_is_not_read():
    made = model().eval()
    given = ids(rows=1)
    padded = torch.cat([torch.full((1, 8), 3), given], dim=1)
    mask = torch.cat([torch.zeros(1, 8, dtype=torch.long), torch.ones_like(given)], dim=1)
    found = made.hidden_states(padded, mask)[:, 2:]
    torch.testing.assert_close(found, made.hidden_states(given), rtol=0, atol=1e-5)


def test_labels_choose_what_is_learnt():
    made = model().train()
    given = ids()
    whole = made(given, labels=given, noise=RowNoise([1, 2])).loss
    labels = given.clone()
    labels[1] = IGNORED
    first = made(given, labels=labels, noise=RowNoise([1, 2])).loss
    second = made(given, labels=torch.where(labels == IGNORED, given, IGNORED), noise=RowNoise([1, 2])).loss
    torch.testing.assert_close(whole, (first + second) / 2)
    parts = made(given, labels=labels, noise=RowNoise([1, 2]), num_chunks=10.0).loss
    torch.testing.assert_close(parts, first * 5 / 10)
    none = made(given, labels=torch.full_like(given, IGNORED)).loss
    assert none.item() == 0


def test_the_trainer_of_transformers_trains_it(tmp_path):
    made = model()
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids(rows=32)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        report_to=[],
        save_strategy="no",
        logging_steps=5,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=made, args=arguments, train_dataset=rows)  # pyright: ignore
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.95 * losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.chunk_size == 4


def test_pushing_to_a_hub_sends_everything(monkeypatch):
    from transformers.utils import hub

    sent = []
    api = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    card = SimpleNamespace(save=lambda _path: None)  # what the hub has already is kept
    monkeypatch.setattr(hub, "hf_api", lambda: api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: card)

    def upload(_model, directory, *_, **__):
        sent.extend(sorted(path.name for path in Path(directory).iterdir()))

    monkeypatch.setattr(CalmForCausalLM, "_upload_modified_files", upload)
    model().push_to_hub("somebody/calm")
    assert sent == ["README.md", "config.json", "model.safetensors"]


def test_the_head_is_a_tenth_and_a_quarter():
    config = CalmConfig({"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4}, AUTOENCODER)
    assert config.num_head_layers == 3


def test_mistakes_are_told():
    with pytest.raises(
        ConfigError, match="head must be one of energy, flow, diffusion, not 'enrgy'; did you mean energy"
    ):
        CalmConfig(SMALL, AUTOENCODER, head="enrgy")  # pyright: ignore
    with pytest.raises(ConfigError, match="model_input must be one of"):
        CalmConfig(SMALL, AUTOENCODER, model_input="words")  # pyright: ignore
    with pytest.raises(ConfigError, match="backbone 'lama'"):
        CalmConfig({"model_type": "lama"}, AUTOENCODER)
    with pytest.raises(ConfigError, match="whole chunks of 4 tokens, and 9 is no multiple of 4; pad"):
        model().hidden_states(torch.zeros(1, 9, dtype=torch.long))
    short = CalmForCausalLM(CalmConfig({**SMALL, "max_position_embeddings": 4}, AUTOENCODER))
    with pytest.raises(ConfigError, match=r"5 chunks \(20 tokens\) are more than the backbone's 4 positions"):
        short.hidden_states(torch.zeros(1, 20, dtype=torch.long))
    with pytest.raises(ConfigError, match="at least 2, not 1"):
        model(num_model_samples=1)
    with pytest.raises(ConfigError, match="alpha must lie in"):
        model(alpha=3.0)
    with pytest.warns(CalmWarning, match="paper's runs failed"):
        model(alpha=0.75)


def test_directories_that_are_something_else(tmp_path):
    made = model()
    made.save_pretrained(tmp_path / "calm")
    made.autoencoder.save_pretrained(tmp_path / "autoencoder")
    with pytest.raises(UserError, match="holds a CALM language model, not an autoencoder"):
        load_autoencoder(tmp_path / "calm")
    with pytest.raises(UserError, match="holds an autoencoder, not a CALM language model"):
        load_calm(tmp_path / "autoencoder")
    with pytest.raises(UserError, match="no config.json"):
        load_calm(tmp_path / "nowhere")
    weights = tmp_path / "calm" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(UserError, match="cannot be read"):
        load_calm(tmp_path / "calm")
    (tmp_path / "calm" / "config.json").write_text("{")
    with pytest.raises(UserError, match="does not say what model"):
        load_calm(tmp_path / "calm")
