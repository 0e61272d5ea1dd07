"""The language model: any backbone, one directory, a frozen autoencoder, caches, and the habits of transformers."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache, Trainer, TrainingArguments

import calm  # noqa: F401
from calm.errors import CalmWarning, ConfigError, UserError
from calm.models.calm import IGNORED, CalmForCausalLM
from calm.models.configuration import CalmConfig
from calm.models.loading import load_autoencoder, load_calm
from calm.noise import RowNoise
from calm.scores.tokens import Words

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
    latents, tokens, true = made.predict(given, 3)
    assert latents.shape == (3, 2, 5, 8)
    assert tokens.shape == (3, 2, 5, chunk_size)
    assert true.mean.shape == (2, 5, 8)
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
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
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
    assert losses[0] < 20  # a mean, not a sum over the accumulated parts
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


def test_the_head_is_a_tenth_of_the_model_and_has_a_quarter_of_the_layers():
    wide = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 12, "num_attention_heads": 4}
    made = CalmForCausalLM(CalmConfig(wide, {**AUTOENCODER, "vocab_size": 9000}))
    assert made.config.num_head_layers == 3
    inside = sum(p.numel() for p in made.parameters() if p.requires_grad)
    assert 0.07 < sum(p.numel() for p in made.head.parameters()) / inside < 0.13


@pytest.mark.parametrize("head", ["energy", "flow", "mean-flow", "diffusion"])
def test_heads_begin_at_zero_and_in_the_scale_of_their_width(head, tmp_path):
    made = model(head=head)
    of_noise = head == "energy"
    inner: Any = made.head if of_noise else made.head.denoiser
    last, wide = (inner.latent, inner.mix) if of_noise else (inner.output, inner.blocks[0].mlp[0])
    assert not last.weight.any()
    assert not last.bias.any()
    assert wide.weight.std().item() == pytest.approx((2 / (32 + 32)) ** 0.5, rel=0.1)  # Xavier
    if not of_noise:
        assert not inner.blocks[0].modulation.weight.any()
    torch.nn.init.normal_(last.weight)
    made.save_pretrained(tmp_path)
    again: Any = load_calm(tmp_path).head
    loaded = again.latent if of_noise else again.denoiser.output
    assert torch.equal(loaded.weight, last.weight)  # loading does not begin anew


def test_forward_learns_the_chunk_behind_each_position():
    made = model().train()
    given, noise = ids(), [1, 2]
    loss = made(given, labels=given, noise=RowNoise(noise)).loss
    with torch.no_grad():
        hidden = made.hidden_states(given[:, :-4])
        chunks = given.view(2, 6, 4)
        behind = made.head.loss(hidden, made.autoencoder.encode(chunks[:, 1:]), generator=RowNoise(noise))
        same = made.head.loss(hidden, made.autoencoder.encode(chunks[:, :-1]), generator=RowNoise(noise))
    torch.testing.assert_close(loss, behind)
    assert (loss - same).abs() > 1e-3


def chain(**fields) -> CalmForCausalLM:
    """A chain over few words, whose weights are large enough to tell them apart."""
    torch.manual_seed(0)
    inner = {"vocab_size": 5, "chunk_size": 3, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    made = CalmForCausalLM(CalmConfig(SMALL, inner, head="chain", **fields)).eval()
    parts = (*made.head.parameters(), *made.autoencoder.embedding.parameters())
    for seed, weight in enumerate(weight for weight in parts if weight.ndim == 2):
        torch.nn.init.normal_(weight, std=0.6, generator=torch.Generator().manual_seed(seed))
    return made


def chain_probabilities(made: CalmForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """P of all chunks of three tokens by the chain rule, token by token: (V, V, V)."""
    head, words = made.head, made.words
    table = torch.zeros(5, 5, 5)
    for x, y, z in itertools.product(range(5), repeat=3):
        p = 1.0
        for k, token in enumerate((x, y, z)):
            (state,) = head(hidden, words[torch.tensor([x, y, z][:k], dtype=torch.long)], k)
            p = p * (words @ state).softmax(0)[token]
        table[x, y, z] = p
    return table


@torch.no_grad()
@pytest.mark.parametrize("own_words", [False, True])
def test_a_chain_learns_the_nats_of_chunks(own_words):
    made, given = chain(own_words=own_words), torch.tensor([[0, 1, 2, 4, 3, 3]])
    assert torch.equal(made.words, made.autoencoder.embedding.weight) != own_words
    table = chain_probabilities(made, made.hidden_states(given[:, :3])[0, 0])
    assert table.sum().item() == pytest.approx(1, abs=1e-5)
    loss = made(given, labels=given).loss
    assert 3 * loss.item() == pytest.approx(-table[4, 3, 3].log().item(), rel=1e-4)
    every = Words(torch.arange(5), torch.ones(5))
    assert made(given, labels=given, words=every).loss.item() == pytest.approx(loss.item(), rel=1e-5)


@torch.no_grad()
def test_a_chain_draws_chunks_by_their_probability():
    made, count = chain(), 40_000
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    drawn = made.draw(hidden, count, torch.Generator().manual_seed(1))  # (N, 2, 3)
    for row in range(2):
        expected = count * chain_probabilities(made, hidden[row]).flatten()
        counts = torch.bincount(drawn[:, row] @ torch.tensor([25, 5, 1]), minlength=125)
        frequent = expected > 5
        chi = ((counts - expected) ** 2 / expected)[frequent].sum()
        assert chi < frequent.sum() + 5 * (2 * frequent.sum()) ** 0.5
        assert frequent.sum() > 40
    noise = RowNoise([3, 4])
    assert made.draw(hidden, 6, noise).shape == (6, 2, 3)
    latents, chunks, _ = made.predict(torch.tensor([[0, 1, 2, 4, 3, 3]]), 7, RowNoise([0]))
    assert torch.equal(latents, made.autoencoder.encode(chunks).mean)


def test_a_chain_of_one_token_has_nothing_before_it(tmp_path):
    inner = {"vocab_size": 5, "chunk_size": 1, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    made = CalmForCausalLM(CalmConfig(SMALL, inner, head="chain"))
    made(torch.tensor([[0, 1, 2]]), labels=torch.tensor([[0, 1, 2]])).loss.backward()
    assert made.draw(torch.randn(2, 3, 32), 4).shape == (4, 2, 3, 1)
    made.save_pretrained(tmp_path)
    again = load_calm(tmp_path)
    assert torch.equal(again.head.hidden.weight, made.head.hidden.weight)


def test_damaged_weights_are_told():
    for made in (chain(), model()):
        with pytest.raises(UserError, match="weights are damaged"):
            made.draw(torch.full((1, 32), torch.nan))


def test_attention_can_be_chosen(tmp_path):
    model().save_pretrained(tmp_path)
    for kind in ("eager", "sdpa"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=kind)
        assert loaded.backbone.config._attn_implementation == kind


def test_weights_are_read_in_fp32(tmp_path):
    model().to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_calm(tmp_path).dtype == torch.float32


def test_padding_is_not_learnt():
    made = model().train()
    given = ids(rows=1)
    alone = made(given, labels=given, noise=RowNoise([1])).loss
    for left, right in ((8, 0), (0, 8)):
        fill = torch.full((1, left), 3), torch.full((1, right), 3)
        padded = torch.cat([fill[0], given, fill[1]], dim=1)
        mask = torch.cat([torch.zeros(1, left), torch.ones_like(given), torch.zeros(1, right)], dim=1).long()
        with patch.object(made.head, "loss", wraps=made.head.loss) as compute:
            loss = made(padded, labels=padded, attention_mask=mask, noise=RowNoise([1])).loss
        assert compute.call_args.args[2].sum() == 5  # six chunks, of which the first has nothing before it
        assert loss.isfinite()
        if right:  # the noise of the first positions is the same
            assert loss.item() == pytest.approx(alone.item(), rel=0.2)


def test_mistakes_are_told():
    with pytest.raises(
        ConfigError,
        match="head must be one of energy, flow, .* not 'enrgy'; did you mean energy",
    ):
        CalmConfig(SMALL, AUTOENCODER, head="enrgy")  # pyright: ignore
    with pytest.raises(ConfigError, match="model_input must be one of"):
        CalmConfig(SMALL, AUTOENCODER, model_input="words")  # pyright: ignore
    for fields, message in (
        ({"model_type": "lama"}, "no model_type 'lama' in transformers; did you mean llama"),
        ({"hiden_size": 64}, "a llama has no field 'hiden_size'; did you mean hidden_size"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "llama cannot be built"),
    ):
        with pytest.raises(ConfigError, match=message):
            CalmConfig(fields, AUTOENCODER)
    with pytest.raises(ConfigError, match="reads in both directions"):
        CalmForCausalLM(CalmConfig({**SMALL, "model_type": "bert"}, AUTOENCODER))
    for wrong in ({"sampler": "heun"}, {"num_head_layers": 0}, {"num_target_samples": 0}, {"num_sampling_steps": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            CalmConfig(SMALL, AUTOENCODER, **wrong)
    for given, labels, message in (
        (9, 9, "whole chunks of 4 tokens, and 9 is no multiple of 4"),
        (4, 4, "at least two chunks"),
        (8, 4, r"labels of shape \(1, 4\) for input_ids of \(1, 8\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            model()(torch.zeros(1, given, dtype=torch.long), labels=torch.zeros(1, labels, dtype=torch.long))
    with pytest.raises(TypeError):
        model()(ids(), label=ids())
    with pytest.raises(ConfigError, match="whole chunks of 4 tokens, and 9 is no multiple of 4; pad"):
        model().hidden_states(torch.zeros(1, 9, dtype=torch.long))
    short = CalmForCausalLM(CalmConfig({**SMALL, "max_position_embeddings": 4}, AUTOENCODER))
    with pytest.raises(ConfigError, match="5 chunks are more than the backbone's 4 positions"):
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
    with pytest.raises(UserError, match="cannot be read: config.json"):
        load_calm(tmp_path / "calm")
    (tmp_path / "calm" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="the field 'model_type' is missing"):
        load_calm(tmp_path / "calm")
