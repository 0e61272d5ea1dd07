"""The language model as a class of transformers: backbones, directories, frozen autoencoder, caches, Trainer, Hub."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import calm  # noqa: F401 - registers the Auto classes
from calm.checkpoint import load_autoencoder, load_calm, save_model
from calm.errors import CalmWarning, ConfigError, UserError
from calm.heads import HEADS, VectorHead
from calm.heads.base import check_finite
from calm.hf import IGNORE_INDEX, CalmConfig, CalmForCausalLM
from calm.model import Calm
from calm.noise import RowNoise
from calm.scores.vocabulary import VocabularySubset
from calm.train.stages import new_transformer

AUTOENCODER = {"vocab_size": 60, "chunk_size": 4, "latent_size": 8, "hidden_size": 16, "intermediate_size": 24}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
BACKBONES = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gpt_neox": {},
    "mistral": {"num_key_value_heads": 2},
}


def make_model(kind="llama", chunk_size=4, **fields) -> CalmForCausalLM:
    torch.manual_seed(0)
    backbone = {"model_type": kind, **SMALL, **BACKBONES[kind]}
    model = CalmForCausalLM(CalmConfig(backbone, {**AUTOENCODER, "chunk_size": chunk_size}, **fields))
    torch.nn.init.normal_(model.autoencoder.encoder.posterior.weight, std=0.3)  # so that latents differ
    return model


def make_ids(rows=2, chunks=6, chunk_size=4) -> torch.Tensor:
    return torch.randint(60, (rows, chunks * chunk_size), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize(
    ("head", "model_input"), [("energy", "discrete"), ("flow", "continuous"), ("diffusion", "both")]
)
def test_save_and_load_with_any_backbone(kind, head, model_input, tmp_path):
    model, ids = make_model(kind, head=head, model_input=model_input), make_ids()
    model.train()
    loss = model(ids, labels=ids, noise=RowNoise([1, 2])).loss
    loss.backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in model.named_parameters() if p.grad is not None}
    assert not any(name.startswith("autoencoder") for name in trained)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is CalmForCausalLM
    for (name, one), (other_name, other) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name
    loaded.train()
    assert torch.equal(loss, loaded(ids, labels=ids, noise=RowNoise([1, 2])).loss)
    plain = load_calm(tmp_path).train()
    assert type(plain) is Calm
    assert torch.equal(loss, plain(ids.view(2, 6, 4), noise=RowNoise([1, 2]))["loss"])
    with torch.no_grad():
        hidden = model.eval()(ids).last_hidden_state
        assert torch.equal(hidden, loaded.eval()(ids).last_hidden_state)
        assert torch.equal(hidden, plain.eval().hidden_states(ids.view(2, 6, 4)))
    card = (tmp_path / "README.md").read_text()
    assert "Each step of its backbone predicts the next 4 tokens." in card
    assert json.loads((tmp_path / "config.json").read_text())["head"] == head


@pytest.mark.parametrize("kind", BACKBONES)
def test_directories_of_plain_models_load_with_the_auto_classes(kind, tmp_path):
    make_model(kind).save_pretrained(tmp_path / "transformers")
    plain, ids = load_calm(tmp_path / "transformers"), make_ids()
    save_model(plain, tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(loaded) is CalmForCausalLM
    assert loaded.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(loaded(ids).last_hidden_state, plain.hidden_states(ids.view(2, 6, 4)))


@pytest.mark.parametrize("kind", ["openai-gpt", "gpt2", "bloom"])
@torch.no_grad()
def test_buffers_that_are_not_saved(kind, tmp_path):
    """Position ids and the like, of the model itself or of its modules, are computed when a directory is loaded."""
    backbone = {"model_type": kind, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model, ids = CalmForCausalLM(CalmConfig(backbone, AUTOENCODER)).eval(), make_ids()
    model.save_pretrained(tmp_path)
    hidden = model(ids).last_hidden_state
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).last_hidden_state, hidden)
    assert torch.equal(load_calm(tmp_path).hidden_states(ids.view(2, 6, 4)), hidden)


@pytest.mark.parametrize("kind", BACKBONES)
def test_weights_of_other_architectures_are_found_by_name(kind):
    """As checkpoints of the training loop look for them, in a backbone and in a Transformer."""
    backbone = {"model_type": kind, **SMALL, **BACKBONES[kind]}
    for model in (make_model(kind), new_transformer(backbone, 60)):
        for name, parameter in model.named_parameters():
            assert model.get_parameter(name) is parameter
        assert get_model_state_dict(model).keys() == model.state_dict().keys()
        assert len(model.backbone.layers) == 4


@pytest.mark.parametrize("chunk_size", [1, 2, 8])
def test_any_chunk_size(chunk_size):
    model = make_model(chunk_size=chunk_size)
    ids = make_ids(chunk_size=chunk_size)
    chunks = model.chunks(ids)
    assert chunks.shape == (2, 6, chunk_size)
    assert model.hidden_states(chunks).shape == (2, 6, 32)
    assert model(ids).last_hidden_state.shape == (2, 6, 32)
    latents, tokens, posterior = model.predict(chunks, 3)
    assert latents.shape == (3, 2, 5, 8)
    assert tokens.shape == (3, 2, 5, chunk_size)
    assert posterior.mean.shape == (2, 5, 8)
    assert model(ids, labels=ids).loss.isfinite()


def test_autoencoder_stays_frozen(tmp_path):
    model, ids = make_model(), make_ids()
    before = {name: value.clone() for name, value in model.autoencoder.state_dict().items()}
    model.save_pretrained(tmp_path)
    for trained in (model, CalmForCausalLM.from_pretrained(tmp_path), load_calm(tmp_path)):
        trained.requires_grad_(True)
        trained.train()
        assert not trained.autoencoder.training
        assert all(not module.training for module in trained.autoencoder.modules())
        assert not any(p.requires_grad for p in trained.autoencoder.parameters())
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, weight_decay=0.5)
        for _ in range(100):
            hf = isinstance(trained, CalmForCausalLM)
            output = trained(ids, labels=ids) if hf else trained(ids.view(2, 6, 4))
            output["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in trained.autoencoder.state_dict().items():
            assert torch.equal(value, before[name]), name


def test_attention_is_causal():
    model, chunks = make_model().eval(), make_ids().view(2, 6, 4)
    changed = chunks.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 60
    one, other = model.hidden_states(chunks), model.hidden_states(changed)
    torch.testing.assert_close(one[:, :3], other[:, :3])
    assert (one[:, 3:] - other[:, 3:]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", BACKBONES)
@torch.no_grad()
def test_cached_decoding_matches_the_full_pass(kind):
    model, ids = make_model(kind).eval(), make_ids(chunks=9)
    full = model(ids).last_hidden_state
    cache = model.backbone.new_cache()
    outputs = [model(ids[:, :16], past_key_values=cache)]  # a prompt of four chunks
    assert cache.length == 4
    outputs += [model(ids[:, start : start + 4], past_key_values=cache) for start in range(16, 36, 4)]
    assert cache.length == 9
    assert all(output.past_key_values is cache for output in outputs)
    found = torch.cat([output.last_hidden_state for output in outputs], dim=1)
    torch.testing.assert_close(found, full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", BACKBONES)
def test_left_padding_is_masked(kind):
    model, ids = make_model(kind).eval(), make_ids(rows=1)
    padded = torch.cat([torch.full((1, 8), 3), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 8, dtype=torch.long), torch.ones_like(ids)], dim=1)
    found = model(padded, attention_mask=mask).last_hidden_state[:, 2:]
    torch.testing.assert_close(found, model(ids).last_hidden_state, rtol=0, atol=1e-5)


def test_ignored_labels_do_not_count():
    model, ids = make_model().train(), make_ids()
    whole = model(ids, labels=ids, noise=RowNoise([1, 2])).loss
    labels = ids.clone()
    labels[1] = IGNORE_INDEX
    first = model(ids, labels=labels, noise=RowNoise([1, 2])).loss
    others = torch.where(labels == IGNORE_INDEX, ids, IGNORE_INDEX)
    second = model(ids, labels=others, noise=RowNoise([1, 2])).loss
    torch.testing.assert_close(whole, (first + second) / 2)
    share = model(ids, labels=labels, noise=RowNoise([1, 2]), num_chunks=10.0).loss
    torch.testing.assert_close(share, first * 5 / 10)
    none = model(ids, labels=torch.full_like(ids, IGNORE_INDEX)).loss
    assert none.item() == 0


def test_transformers_trainer(tmp_path):
    model = make_model()
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in make_ids(rows=32)]
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
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)  # pyright: ignore
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.95 * losses[0]
    assert losses[0] < 20  # a mean over the accumulated micro-batches, not a sum
    trainer.save_model(str(tmp_path / "saved"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.chunk_size == 4


def test_push_to_hub(monkeypatch):
    from transformers.utils import hub

    uploaded = []
    api = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    card = SimpleNamespace(save=lambda _path: None)  # an existing card is kept
    monkeypatch.setattr(hub, "hf_api", lambda: api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: card)

    def upload(_model, directory, *_, **__):
        uploaded.extend(sorted(path.name for path in Path(directory).iterdir()))

    monkeypatch.setattr(CalmForCausalLM, "_upload_modified_files", upload)
    make_model().push_to_hub("somebody/calm")
    assert uploaded == ["README.md", "config.json", "model.safetensors"]


def test_default_size_of_the_head():
    """A quarter of the layers, and about a tenth of the parameters."""
    wide = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 12, "num_attention_heads": 4}
    model = CalmForCausalLM(CalmConfig(wide, {**AUTOENCODER, "vocab_size": 9000}))
    assert model.config.num_head_layers == 3
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 0.07 < sum(p.numel() for p in model.head.parameters()) / trained < 0.13


@pytest.mark.parametrize("head", [name for name, kind in HEADS.items() if issubclass(kind, VectorHead)])
def test_initialisation_of_heads(head, tmp_path):
    """The output starts at zero, the other layers by Xavier; loading does not initialize again."""
    model = make_model(head=head)
    network: Any = model.head if head == "energy" else model.head.denoiser
    output, wide = (network.latent, network.mix) if head == "energy" else (network.output, network.blocks[0].mlp[0])
    assert not output.weight.any()
    assert not output.bias.any()
    assert wide.weight.std().item() == pytest.approx((2 / (32 + 32)) ** 0.5, rel=0.1)
    if head != "energy":
        assert not network.blocks[0].modulation.weight.any()
    torch.nn.init.normal_(output.weight)
    model.save_pretrained(tmp_path)
    for loaded in (load_calm(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        loaded_head: Any = loaded.head
        found = loaded_head.latent if head == "energy" else loaded_head.denoiser.output
        assert torch.equal(found.weight, output.weight)


def test_each_position_predicts_the_next_chunk():
    model, ids, seeds = make_model().train(), make_ids(), [1, 2]
    loss = model(ids, labels=ids, noise=RowNoise(seeds)).loss
    with torch.no_grad():
        chunks = model.chunks(ids)
        hidden = model.hidden_states(chunks[:, :-1])
        following = model.head.loss(hidden, chunks[:, 1:], noise=RowNoise(seeds))
        same = model.head.loss(hidden, chunks[:, :-1], noise=RowNoise(seeds))
    torch.testing.assert_close(loss, following)
    assert (loss - same).abs() > 1e-3


def make_chain(**fields) -> CalmForCausalLM:
    """A chain head over a small vocabulary, with weights that are large enough to tell tokens apart."""
    torch.manual_seed(0)
    inner = {"vocab_size": 5, "chunk_size": 3, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    model = CalmForCausalLM(CalmConfig(SMALL, inner, head="chain", **fields)).eval()
    parts = (*model.head.parameters(), *model.autoencoder.embedding.parameters())
    for seed, weight in enumerate(weight for weight in parts if weight.ndim == 2):
        torch.nn.init.normal_(weight, std=0.6, generator=torch.Generator().manual_seed(seed))
    return model


def chain_probabilities(model: CalmForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """Probabilities of all chunks of three tokens by the chain rule, token by token: (V, V, V)."""
    head: Any = model.head
    table = torch.zeros(5, 5, 5)
    for chunk in itertools.product(range(5), repeat=3):
        p = 1.0
        for k, token in enumerate(chunk):
            state = head.next_state(hidden, torch.tensor(chunk[:k], dtype=torch.long))
            p = p * (head.vocabulary @ state).softmax(0)[token]
        table[chunk] = p
    return table


@torch.no_grad()
@pytest.mark.parametrize("untied_lm_head", [False, True])
def test_loss_of_the_chain_head_is_the_cross_entropy_of_chunks(untied_lm_head):
    model, ids = make_chain(untied_lm_head=untied_lm_head), torch.tensor([[0, 1, 2, 4, 3, 3]])
    assert torch.equal(model.head.vocabulary, model.autoencoder.embedding.weight) != untied_lm_head
    table = chain_probabilities(model, model.hidden_states(model.chunks(ids[:, :3]))[0, 0])
    assert table.sum().item() == pytest.approx(1, abs=1e-5)
    loss = model(ids, labels=ids).loss
    assert 3 * loss.item() == pytest.approx(-table[4, 3, 3].log().item(), rel=1e-4)
    whole = VocabularySubset(torch.arange(5), torch.ones(5))
    assert model(ids, labels=ids, vocabulary=whole).loss.item() == pytest.approx(loss.item(), rel=1e-5)


@torch.no_grad()
def test_chain_head_samples_chunks_by_their_probability():
    model, count = make_chain(), 40_000
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    drawn = model.head.propose(hidden, count, torch.Generator().manual_seed(1)).tokens()  # (N, 2, 3)
    for row in range(2):
        expected = count * chain_probabilities(model, hidden[row]).flatten()
        counts = torch.bincount(drawn[:, row] @ torch.tensor([25, 5, 1]), minlength=125)
        frequent = expected > 5
        chi = ((counts - expected) ** 2 / expected)[frequent].sum()
        assert chi < frequent.sum() + 5 * (2 * frequent.sum()) ** 0.5
        assert frequent.sum() > 40
    assert model.head.propose(hidden, 6, RowNoise([3, 4])).tokens().shape == (6, 2, 3)
    latents, chunks, _ = model.predict(torch.tensor([[[0, 1, 2], [4, 3, 3]]]), 7, RowNoise([0]))
    assert torch.equal(latents, model.autoencoder.encode(chunks).mean)


def test_chain_head_with_chunks_of_one_token(tmp_path):
    inner = {"vocab_size": 5, "chunk_size": 1, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    model = CalmForCausalLM(CalmConfig(SMALL, inner, head="chain"))
    model(torch.tensor([[0, 1, 2]]), labels=torch.tensor([[0, 1, 2]])).loss.backward()
    assert model.head.propose(torch.randn(2, 3, 32), 4).tokens().shape == (4, 2, 3, 1)
    model.save_pretrained(tmp_path)
    loaded: Any = load_calm(tmp_path).head
    assert torch.equal(loaded.hidden.weight, model.head.hidden.weight)


def test_directories_of_version_0_1(tmp_path):
    """Fields and weights that were renamed since then."""
    model = make_chain(untied_lm_head=True, front_padding=False)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for old, new in (("own_words", "untied_lm_head"), ("knows_fill", "front_padding")):
        config[old] = config.pop(new)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    weights["head.own_words.weight"] = weights.pop("head.lm_head.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for loaded in (load_calm(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert loaded.config.untied_lm_head
        assert not loaded.config.front_padding
        assert not {"own_words", "knows_fill"} & vars(loaded.config).keys()
        assert torch.equal(loaded.head.vocabulary, model.head.vocabulary)


def test_damaged_weights_are_reported():
    for model in (make_chain(), make_model()):
        with pytest.raises(UserError, match="output is not finite"):
            check_finite(model.head.propose(torch.full((1, 32), torch.nan), 1))


@pytest.mark.parametrize("kind", BACKBONES)
def test_attention_implementation_can_be_chosen(kind, tmp_path):
    model, ids = make_model(kind).eval(), make_ids()
    model.save_pretrained(tmp_path)
    for implementation in ("eager", "sdpa"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)
        assert loaded.backbone.config._attn_implementation == implementation
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).last_hidden_state, model(ids).last_hidden_state, rtol=0, atol=1e-5)


def test_weights_are_loaded_in_fp32(tmp_path):
    make_model().to(torch.bfloat16).save_pretrained(tmp_path)
    assert all(parameter.dtype == torch.float32 for parameter in load_calm(tmp_path).parameters())


def test_padding_does_not_count_in_the_loss():
    model, ids = make_model().train(), make_ids(rows=1)
    alone = model(ids, labels=ids, noise=RowNoise([1])).loss
    for left, right in ((8, 0), (0, 8)):
        padded = torch.cat([torch.full((1, left), 3), ids, torch.full((1, right), 3)], dim=1)
        mask = torch.cat([torch.zeros(1, left), torch.ones_like(ids), torch.zeros(1, right)], dim=1).long()
        with patch.object(model.head, "loss", wraps=model.head.loss) as compute:
            loss = model(padded, labels=padded, attention_mask=mask, noise=RowNoise([1])).loss
        assert compute.call_args.kwargs["mask"].sum() == 5  # six chunks, of which the first has none before it
        assert loss.isfinite()
        if right:  # the noise of the first positions is the same
            assert loss.item() == pytest.approx(alone.item(), rel=0.2)


def test_invalid_configs():
    with pytest.raises(
        ConfigError,
        match="head must be one of energy, flow, .* not 'enrgy'; did you mean energy",
    ):
        CalmConfig(SMALL, AUTOENCODER, head="enrgy")
    with pytest.raises(ConfigError, match="model_input must be one of"):
        CalmConfig(SMALL, AUTOENCODER, model_input="tokens")
    for fields, message in (
        ({"model_type": "lama"}, "transformers has no model_type 'lama'; did you mean llama"),
        ({"hiden_size": 64}, "llama has no field 'hiden_size'; did you mean hidden_size"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "llama cannot be built"),
    ):
        with pytest.raises(ConfigError, match=message):
            CalmConfig(fields, AUTOENCODER)
    with pytest.raises(ConfigError, match="bidirectional"):
        CalmForCausalLM(CalmConfig({**SMALL, "model_type": "bert"}, AUTOENCODER))
    for head, wrong in (
        ("flow", {"sampler": "heun"}),
        ("energy", {"num_head_layers": 0}),
        ("energy", {"num_target_samples": 0}),
        ("flow", {"num_sampling_steps": -1}),
        ("diffusion", {"num_sampling_steps": -1}),
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            CalmConfig(SMALL, AUTOENCODER, head=head, **wrong)
    with pytest.raises(ConfigError, match="at least 2, not 1"):
        make_model(num_model_samples=1)
    with pytest.raises(ConfigError, match="alpha must be in"):
        make_model(alpha=3.0)
    with pytest.warns(CalmWarning, match="paper's runs failed"):
        make_model(alpha=0.75)


def test_invalid_inputs():
    for length, labels, message in (
        (9, 9, "whole chunks of 4 tokens, and 9 is not a multiple of 4"),
        (4, 4, "at least two chunks"),
        (8, 4, r"labels of shape \(1, 4\) for input_ids of \(1, 8\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_model()(torch.zeros(1, length, dtype=torch.long), labels=torch.zeros(1, labels, dtype=torch.long))
    with pytest.raises(TypeError):
        make_model()(make_ids(), label=make_ids())
    for read in (make_model().chunks, make_model()):
        with pytest.raises(ConfigError, match="whole chunks of 4 tokens, and 9 is not a multiple of 4; pad"):
            read(torch.zeros(1, 9, dtype=torch.long))
    short = CalmForCausalLM(CalmConfig({**SMALL, "max_position_embeddings": 4}, AUTOENCODER))
    with pytest.raises(ConfigError, match="5 chunks exceed the backbone's 4 positions"):
        short(torch.zeros(1, 20, dtype=torch.long))
    cache = short.backbone.new_cache()
    short(torch.zeros(1, 16, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ConfigError, match="5 chunks exceed the backbone's 4 positions"):
        short(torch.zeros(1, 4, dtype=torch.long), past_key_values=cache)


def test_directories_of_another_kind(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path / "calm")
    save_model(model.autoencoder, tmp_path / "autoencoder")
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
