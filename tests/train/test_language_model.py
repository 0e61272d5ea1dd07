"""Training of CALM models and of the Transformer baseline: learning, exact resumption, and error handling."""

import json
import shutil
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from transformers import LlamaConfig as TransformersLlamaConfig

import calm  # noqa: F401
from calm.checkpoint import load_calm, load_transformer
from calm.config import load_config
from calm.data.loader import Batch
from calm.errors import ConfigError, DataError, UserError
from calm.evaluate.health import evaluate_predictions, evaluate_transformer
from calm.llama import LlamaConfig
from calm.scores import vocabulary
from calm.train.loop import train
from calm.transformer import Transformer
from tests.train.conftest import BACKBONE, metrics, run
from tests.train.test_distributed import succeed


def settings(recipe, *more):
    return load_config(str(recipe), list(more))


@pytest.mark.parametrize("head", ["energy", "flow", "mean-flow", "diffusion", "chain", "probit"])
def test_every_head_learns(language_model, autoencoder, tmp_path, head):
    more = [
        f"language_model.head={head}",
        "language_model.num_sampling_steps=4",
        "train.steps=60",
        "train.evaluate_every=30",
    ]
    summary = train(settings(language_model, *more), tmp_path / "run")
    losses = metrics(tmp_path / "run")
    assert np.mean([losses[s] for s in range(51, 61)]) < 0.95 * np.mean([losses[s] for s in range(1, 6)])
    for name in ("energy_loss", "fidelity", "diversity", "context_gap", "sample_spread", "same_chunk", "brier_1"):
        assert np.isfinite(summary[name])
    assert summary["energy_loss"] == pytest.approx(summary["fidelity"] - summary["diversity"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert len(tokenizer) == model.config.vocab_size
    special_ids = model.config.eos_token_id, model.config.pad_token_id
    assert special_ids == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.config.front_padding
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, temperature=0.5, num_candidates=5).shape[1] <= 9
    before = load_file(autoencoder / "model.safetensors")  # frozen
    for name, value in model.autoencoder.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_transformer_learns(transformer, tmp_path):
    summary = train(settings(transformer, "train.steps=60"), tmp_path / "run")
    losses = metrics(tmp_path / "run")
    assert losses[60] < 0.8 * losses[1]
    assert summary["score"] == -summary["cross_entropy"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert type(saved) is LlamaForCausalLM
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_transformer(tmp_path / "run" / "model").logits(tokens), saved(tokens).logits)


def test_resuming_gives_identical_weights(language_model, tmp_path):
    more = settings(language_model, "train.gradient_checkpointing=true", "train.accumulation=2")
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(more, whole)
    shutil.copytree(whole, again)  # as if the run had been killed after step 20
    shutil.rmtree(again / "checkpoints" / "step-00000030")
    shutil.rmtree(again / "model")
    train(more, again, resume=True)
    one, other = (load_file(run / "model" / "model.safetensors") for run in (whole, again))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert metrics(whole) == metrics(again)


FLOW = ("language_model.head=flow", "language_model.model_input=both", "language_model.num_sampling_steps=2")
CHAIN = ("language_model.head=chain", "language_model.vocabulary_sample=50")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("language_model", ()),
        ("language_model", (*FLOW, "train.accumulation=2")),
        ("language_model", (*CHAIN, "train.accumulation=2")),
        ("transformer", ()),
    ],
)
def test_two_processes_equal_one(kind, more, request, tmp_path):
    recipe = request.getfixturevalue(kind)
    short = [part for change in ("train.steps=10", "train.checkpoint_every=5", *more) for part in ("--set", change)]
    one, two = tmp_path / "one", tmp_path / "two"
    succeed(recipe, one, *short)
    succeed(recipe, two, *short, processes=2)
    alone, together = metrics(one), metrics(two)
    assert sorted(together) == list(range(1, 11))
    for step, loss in alone.items():
        assert abs(loss - together[step]) < 1e-4 * abs(loss)
    scores = metrics(one, "score"), metrics(two, "score")
    for step, score in scores[0].items():
        assert abs(score - scores[1][step]) < 1e-3 * abs(score)
    shutil.rmtree(two / "checkpoints" / "step-00000010")
    shutil.rmtree(two / "model")
    succeed(recipe, two, *short, "--resume")  # one process resumes the run of two
    continued = metrics(two)
    assert all(abs(loss - continued[step]) < 1e-4 * abs(loss) for step, loss in alone.items())
    load = load_calm if kind == "language_model" else load_transformer
    assert load(two / "model")


def test_training_starts_from_a_trained_model(language_model, prepared, tmp_path):
    train(settings(language_model), tmp_path / "first")
    values = yaml.safe_load(language_model.read_text())
    values["language_model"] = {"start": str(tmp_path / "first" / "model")}
    values["train"]["steps"] = 10
    (tmp_path / "next.yaml").write_text(yaml.safe_dump(values))
    train(settings(tmp_path / "next.yaml"), tmp_path / "next")
    first, after = metrics(tmp_path / "first"), metrics(tmp_path / "next")
    assert after[1] < 0.95 * first[1]  # it does not start from new weights
    (tmp_path / "next" / "model" / "config.json").unlink()  # as if the run had been interrupted
    train(settings(tmp_path / "next" / "config.yaml"), tmp_path / "next", resume=True)
    assert load_calm(tmp_path / "next" / "model")
    with pytest.raises(ConfigError, match="start uses the model as it is, so head cannot be set"):
        settings(tmp_path / "next.yaml", "language_model.head=flow")


def test_embedding_initialized_from_the_autoencoder(language_model, autoencoder, tmp_path):
    initialized = "language_model.init_embedding_from_autoencoder=true"
    frozen = ("optimizer.learning_rate=1e-12", "optimizer.weight_decay=0", "train.steps=2")
    train(settings(language_model, initialized, *frozen), tmp_path / "run")
    tokens = load_calm(tmp_path / "run" / "model").chunk_embedding.tokens
    embedding = load_file(autoencoder / "model.safetensors")["embedding.weight"]
    assert tokens is not None
    torch.testing.assert_close(tokens.weight[:, : embedding.shape[1]], embedding)
    for wrong in ("language_model.model_input=continuous", "language_model.backbone.hidden_size=8"):
        with pytest.raises(ConfigError, match="needs a token embedding of at least the autoencoder's"):
            train(settings(language_model, initialized, wrong), tmp_path / "x")


def test_untied_lm_head_of_a_chain(language_model, autoencoder, tmp_path):
    """It starts as the autoencoder's embedding, which stays frozen, and is trained."""
    untied = (*CHAIN, "language_model.untied_lm_head=true")
    embedding = load_file(autoencoder / "model.safetensors")["embedding.weight"]
    frozen = ("optimizer.learning_rate=1e-12", "optimizer.weight_decay=0", "train.steps=2")
    train(settings(language_model, *untied, *frozen), tmp_path / "frozen")
    torch.testing.assert_close(load_calm(tmp_path / "frozen" / "model").head.vocabulary, embedding)
    train(settings(language_model, *untied), tmp_path / "run")
    trained = load_calm(tmp_path / "run" / "model")
    assert torch.equal(trained.autoencoder.embedding.weight, embedding)
    assert (trained.head.vocabulary - embedding).abs().max() > 1e-3
    losses = metrics(tmp_path / "run")
    assert losses[max(losses)] < losses[1]


def test_pretrained_backbone_keeps_its_weights_and_embedding(language_model, prepared, tmp_path):
    torch.manual_seed(1)
    pretrained = LlamaForCausalLM(TransformersLlamaConfig(**BACKBONE, vocab_size=398))  # without added special tokens
    pretrained.save_pretrained(tmp_path / "pretrained")
    shutil.copytree(prepared / "tokenizer", tmp_path / "pretrained", dirs_exist_ok=True)
    values = yaml.safe_load(language_model.read_text())
    values["language_model"]["backbone"] = str(tmp_path / "pretrained")
    values["optimizer"]["learning_rate"] = 1e-12
    values["optimizer"]["weight_decay"] = 0.0
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    train(settings(tmp_path / "recipe.yaml"), tmp_path / "run")
    model = load_calm(tmp_path / "run" / "model")
    torch.testing.assert_close(
        model.backbone.layers[1].mlp.up_proj.weight, pretrained.model.layers[1].mlp.up_proj.weight
    )
    assert model.chunk_embedding.tokens is not None
    torch.testing.assert_close(model.chunk_embedding.tokens.weight[:398], pretrained.model.embed_tokens.weight)
    train(settings(tmp_path / "recipe.yaml", "language_model.init_embedding_from_autoencoder=true"), tmp_path / "wide")
    wide = load_calm(tmp_path / "wide" / "model")
    rows, size = wide.autoencoder.embedding.weight.shape
    assert wide.chunk_embedding.tokens is not None
    embedding = wide.chunk_embedding.tokens.weight
    torch.testing.assert_close(embedding[:rows, :size], wide.autoencoder.embedding.weight)
    torch.testing.assert_close(embedding[:398, size:], pretrained.model.embed_tokens.weight[:, size:])
    weights = load_file(tmp_path / "pretrained" / "model.safetensors")
    shutil.copytree(tmp_path / "pretrained", tmp_path / "part")
    weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="do not fit their config.json: .*up_proj"):
        train(settings(tmp_path / "recipe.yaml", f"language_model.backbone={tmp_path / 'part'}"), tmp_path / "x")
    other = tmp_path / "other" / "tokenizer.json"
    shutil.copytree(tmp_path / "pretrained", tmp_path / "other")
    content = json.loads(other.read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    other.write_text(json.dumps(content))
    with pytest.raises(DataError, match="different tokenizers"):
        train(settings(tmp_path / "recipe.yaml", f"language_model.backbone={tmp_path / 'other'}"), tmp_path / "x")


def test_pretrained_backbone_of_another_architecture(language_model, prepared, tmp_path):
    torch.manual_seed(1)
    pretrained = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=398))
    pretrained.save_pretrained(tmp_path / "pretrained")
    shutil.copytree(prepared / "tokenizer", tmp_path / "pretrained", dirs_exist_ok=True)
    changes = ["optimizer.learning_rate=1e-12", "optimizer.weight_decay=0", "train.steps=2"]
    changes.append(f"language_model.backbone={tmp_path / 'pretrained'}")
    train(settings(language_model, *changes), tmp_path / "run")
    model, original = load_calm(tmp_path / "run" / "model"), pretrained.transformer
    torch.testing.assert_close(model.backbone.layers[1].mlp.c_fc.weight, original.h[1].mlp.c_fc.weight)
    assert model.chunk_embedding.tokens is not None
    torch.testing.assert_close(model.chunk_embedding.tokens.weight[:398], original.wte.weight)


def test_errors_are_raised_before_anything_is_written(language_model, transformer, autoencoder, prepared, tmp_path):
    nowhere, long = tmp_path / "nowhere", {**BACKBONE, "max_position_embeddings": 4}
    broken = tmp_path / "broken"
    shutil.copytree(autoencoder, broken)
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    foreign = tmp_path / "foreign"
    shutil.copytree(autoencoder, foreign)
    tokenizer = json.loads((foreign / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (foreign / "tokenizer.json").write_text(json.dumps(tokenizer))
    for recipe, change, kind, message in (
        (language_model, "data.chunk_size=2", ConfigError, "data.chunk_size is 2, but the model in .* has chunks of 4"),
        (language_model, f"language_model.autoencoder={nowhere}", UserError, "is not a model directory"),
        (language_model, f"language_model.autoencoder={broken}", UserError, "cannot be read"),
        (language_model, f"language_model.autoencoder={foreign}", DataError, "different tokenizers"),
        (language_model, f"language_model.backbone={long}", ConfigError, "7 chunks exceed the backbone's 4"),
        (transformer, f"language_model.backbone={long}", ConfigError, "28 tokens exceed the backbone's 4"),
        (language_model, "language_model.backbone={model_type: lama}", ConfigError, "no model_type 'lama'"),
        (transformer, "language_model.backbone={model_type: vit}", ConfigError, "'vit' cannot be built|no field"),
    ):
        with pytest.raises(kind, match=message):
            train(settings(recipe, change), tmp_path / "run")
        assert not list((tmp_path / "run").iterdir())
    for change, message in (
        (
            "language_model.head=enrgy",
            "head must be one of energy, flow, mean-flow, diffusion, chain, probit, not 'enrgy'; did you mean energy",
        ),
        ("language_model.alpha=2.5", "not a proper scoring rule for alpha = 2.5"),
        ("language_model.num_model_samples=1", "at least 2, not 1"),
        ("language_model.autoencoder=null", "language_model.autoencoder is missing"),
        ("language_model.hed=flow", "language_model: unknown key hed; did you mean head"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings(language_model, change)


def test_warning_is_one_line(language_model, tmp_path):
    done = run(language_model, tmp_path / "run", "--set", "language_model.alpha=2", "--set", "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert "warning: alpha = 2 is proper, but not strictly" in done.stderr
    assert "CalmWarning" not in done.stderr


def rows(model, count=4, chunks=8):
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, model.config.vocab_size, (count, chunks * 4))
    return [Batch(tokens, np.ones_like(tokens, dtype=bool), np.arange(count))]


def test_health_metrics_detect_ignored_noise_and_context(language_model, autoencoder, tmp_path):
    train(settings(language_model, "train.steps=5"), tmp_path / "run")
    model = load_calm(tmp_path / "run" / "model")
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.latent.weight, std=0.5)  # samples that depend on noise and context
    with torch.no_grad():
        model.autoencoder.encoder.posterior.weight.mul_(10)  # targets that differ
    batches = rows(model)
    healthy = evaluate_predictions(model, batches)
    assert healthy == evaluate_predictions(model, batches)  # the same noise for the same rows
    assert healthy["sample_spread"] > 0
    with torch.no_grad():
        model.head.noise.weight.zero_()  # the noise is ignored
    no_noise = evaluate_predictions(model, batches)
    assert no_noise["sample_spread"] == pytest.approx(0, abs=1e-5)
    assert no_noise["diversity"] == pytest.approx(0, abs=1e-4)
    assert no_noise["same_chunk"] == 1
    with torch.no_grad():
        model.head.condition.weight.zero_()  # the context is ignored as well
    no_context = evaluate_predictions(model, batches)
    # The other targets are a permutation: only rounding is left. A head with random weights has a gap of either sign.
    assert abs(no_context["context_gap"]) < 1e-6
    assert abs(no_noise["context_gap"]) > 1e-4
    short = batches[0]._replace(mask=batches[0].mask.copy())
    short.mask[1:, 8:] = False  # it is still 0 for rows that are mostly padding
    assert abs(evaluate_predictions(model, [short])["context_gap"]) < 1e-6
    target = torch.from_numpy(batches[0].tokens).unflatten(1, (-1, 4))[:, 1:]
    true = model.posterior(target)
    model.predict = lambda *_: (true.mean.expand(4, -1, -1, -1), target.expand(4, -1, -1, -1), true)
    best = evaluate_predictions(model, batches)
    assert best["brier_lm"] == pytest.approx(100)
    assert best["context_gap"] > 0


def test_transformer_metrics_are_exact():
    torch.manual_seed(0)
    model = Transformer(LlamaConfig(**BACKBONE, vocab_size=11))
    (batch,) = rows(model)
    batch.mask[1, 5:] = False
    found = evaluate_transformer(model, [batch])
    tokens = torch.from_numpy(batch.tokens)
    with torch.no_grad():
        probabilities = model.logits(tokens).softmax(-1)
    nats, brier, count = 0.0, 0.0, 0
    for row in range(4):
        for place in range(1, tokens.shape[1]):
            if batch.mask[row, place]:
                p = probabilities[row, place - 1]
                nats -= p[tokens[row, place]].log().item()
                brier += (2 * p[tokens[row, place]] - (p**2).sum()).item()
                count += 1
    assert found["cross_entropy"] == pytest.approx(nats / count, rel=1e-5)
    assert found["brier_1"] == pytest.approx(100 * brier / count, rel=1e-4)
    with (
        patch.object(vocabulary, "SLICE_ELEMENTS", 11 * 2 * tokens.shape[1]),
        patch.object(model, "logits", wraps=model.logits) as logits,
    ):
        assert evaluate_transformer(model, [batch]) == pytest.approx(found)
    assert [call.args[0].shape[0] for call in logits.call_args_list] == [2, 2]  # logits of two rows are held at once
