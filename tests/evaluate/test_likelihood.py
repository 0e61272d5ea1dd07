"""Likelihood bounds and exact likelihoods, against direct computation."""

import json
import math
import shutil

import pytest
import torch

from calm.checkpoint import load_calm, save_model
from calm.evaluate.harness import continuation_log_likelihood
from calm.model import Calm, PlainCalmConfig
from calm.noise import RowNoise


@torch.no_grad()
def reference_log_likelihood(model, before, after, num_latents, noise) -> float:
    """Log of the mean over latents of the product over tokens, chunk by chunk."""
    size, total, ids = model.chunk_size, 0.0, list(before)
    for start in range(0, len(after), size):
        tokens = after[start : start + size]
        hidden = model.hidden_states(torch.tensor(ids).view(1, -1, size))[:, -1]
        logits = model.autoencoder.decode(model.head.sample(hidden, num_latents, noise)[:, 0])  # (N, K, V)
        log_probs = logits.log_softmax(-1)[:, torch.arange(len(tokens)), tokens].sum(-1)
        total += float(log_probs.logsumexp(0)) - math.log(num_latents)
        ids += tokens
    return total


@pytest.mark.parametrize("length", [3, 8, 10])
def test_continuation_log_likelihood_is_the_sum_over_its_chunks(models, length):
    model = load_calm(models / "calm-4")
    before, after = list(range(8)), [5 + i for i in range(length)]
    found, greedy = continuation_log_likelihood(model, before, after, 6, RowNoise([3]), 2)
    assert found < 0
    assert found == pytest.approx(reference_log_likelihood(model, before, after, 6, RowNoise([3])), rel=1e-4)
    assert not greedy


@torch.no_grad()
def test_greedy_continuation_is_recognized(models):
    model, before = load_calm(models / "calm-4"), list(range(8))
    latents = model.head.sample(model.hidden_states(torch.tensor(before).view(1, -1, 4))[:, -1], 1, RowNoise([3]))
    after = model.autoencoder.tokens(latents)[0, 0].tolist()
    assert continuation_log_likelihood(model, before, after, 1, RowNoise([3]), 2)[1]
    after[-1] = (after[-1] + 1) % model.vocab_size
    assert not continuation_log_likelihood(model, before, after, 1, RowNoise([3]), 2)[1]
    assert continuation_log_likelihood(model, before, [], 1, RowNoise([3]), 2) == (0.0, True)


@torch.no_grad()
def test_cross_entropy_of_all_chunks_at_once(models):
    model = load_calm(models / "calm-2")
    chunks = torch.arange(12).view(1, 6, 2)
    hidden, targets = model.hidden_states(chunks[:, :5]), chunks[:, 1:]
    nats = model.head.cross_entropy(hidden, targets, 4, RowNoise([0]))
    latents = model.head.sample(hidden, 4, RowNoise([0]))
    log_probs = model.autoencoder.decode(latents).log_softmax(-1)  # (N, 1, L, K, V)
    each = log_probs.gather(-1, targets.expand(4, 1, 5, 2)[..., None])[..., 0].sum(-1)
    assert torch.allclose(nats.sum(-1).float(), math.log(4) - each.logsumexp(0), atol=1e-4)


def test_evaluate_reports_a_bound(calm, models, prepared):
    command = ["evaluate", models / "calm-4", models / "softmax", "--data", prepared, "--split", "train", "--json"]
    found = {}
    for latents in (1, 32):
        done = calm(*command, "--likelihood-bound", latents)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["latents"] == latents
        assert "cross_entropy" not in answer["models"]["calm-4"]
        assert "cross_entropy" in answer["models"]["softmax"]
        found[latents] = answer["models"]["calm-4"]["cross_entropy_bound"]
    assert 0 < found[32] < found[1]
    plain = json.loads(calm(*command).stdout)["models"]["calm-4"]
    assert "cross_entropy_bound" not in plain
    assert plain["brier_1"] == answer["models"]["calm-4"]["brier_1"]
    assert "without --positions every" in calm(*command, "--likelihood-bound", 2, "--positions", "every").stderr


@torch.no_grad()
def test_chain_head_has_exact_likelihoods(calm, models, prepared, tmp_path):
    """Cross-entropy of all tokens after the first chunk, by the head, for a continuation, and by the command."""
    trained = load_calm(models / "calm-4")
    torch.manual_seed(0)
    fields = {"head": "chain", "eos_token_id": 0, "pad_token_id": 1}
    model = Calm(PlainCalmConfig(trained.config.backbone_config, trained.config.autoencoder_config, **fields)).eval()
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    chunks = torch.arange(3, 15).view(1, 3, 4)
    hidden, targets = model.hidden_states(chunks[:, :2]), chunks[:, 1:]
    nats = model.head.cross_entropy(hidden, targets, 5, RowNoise([0]))
    states = model.head.states(hidden, targets[..., :-1])
    log_probs = (states @ model.head.vocabulary.T).log_softmax(-1)
    torch.testing.assert_close(nats, -log_probs.gather(-1, targets[..., None])[..., 0], rtol=1e-4, atol=1e-5)
    before, after = chunks[0, 0].tolist(), chunks[0, 1:].flatten().tolist()
    found, _ = continuation_log_likelihood(model, before, after, 3, RowNoise([0]), 2)
    assert found == pytest.approx(-nats.sum().item(), rel=1e-4)
    shutil.copytree(models / "calm-4", tmp_path / "chain")
    save_model(model, tmp_path / "chain")
    done = calm("evaluate", tmp_path / "chain", "--data", prepared, "--split", "train", "--json")
    assert done.returncode == 0, done.stderr
    (measures,) = json.loads(done.stdout)["models"].values()
    assert measures["cross_entropy"] > 0
    assert "cross_entropy_bound" not in measures
