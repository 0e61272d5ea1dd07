"""Bounds of likelihoods against what they are bounds of."""

import json
import math
import shutil

import pytest
import torch

from calm.evaluate.likelihood import chunk_nats, continuation_nats
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import CalmConfig
from calm.models.loading import load_calm
from calm.noise import RowNoise


@torch.no_grad()
def slowly(model, before, behind, num_latents, noise) -> float:
    """-log of the mean over latents of the product over tokens, chunk for chunk."""
    size, total, ids = model.config.chunk_size, 0.0, list(before)
    for start in range(0, len(behind), size):
        tokens = behind[start : start + size]
        hidden = model.hidden_states(torch.tensor([ids]))[:, -1]
        logits = model.autoencoder.decode(model.head.sample(hidden, num_latents, noise)[:, 0])  # (N, K, V)
        logs = logits.log_softmax(-1)[:, torch.arange(len(tokens)), tokens].sum(-1)
        total -= float(logs.logsumexp(0)) - math.log(num_latents)
        ids += tokens
    return total


@pytest.mark.parametrize("length", [3, 8, 10])
def test_a_continuation_costs_what_its_chunks_cost(models, length):
    model = load_calm(models / "calm-4").eval()
    before, behind = list(range(8)), [5 + i for i in range(length)]
    found, likeliest = continuation_nats(model, before, behind, 6, RowNoise([3]), 2)
    assert found == pytest.approx(slowly(model, before, behind, 6, RowNoise([3])), rel=1e-4)
    assert not likeliest


@torch.no_grad()
def test_chunks_cost_the_same_all_at_once(models):
    model = load_calm(models / "calm-2").eval()
    ids = torch.arange(12)[None]
    hidden = model.hidden_states(ids[:, :10])
    nats = chunk_nats(model, hidden, model.chunks(ids)[:, 1:], 4, RowNoise([0]))
    latents = model.head.sample(hidden, 4, RowNoise([0]))
    logs = model.autoencoder.decode(latents).log_softmax(-1)  # (N, 1, L, K, V)
    each = logs.gather(-1, model.chunks(ids)[:, 1:].expand(4, 1, 5, 2)[..., None])[..., 0].sum(-1)
    assert torch.allclose(nats.sum(-1).float(), math.log(4) - each.logsumexp(0), atol=1e-4)


def test_evaluate_reports_it_as_a_bound(calm, models, prepared):
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
def test_a_chain_has_likelihoods_of_its_own(calm, models, prepared, tmp_path):
    """The nats of all tokens behind the first chunk, by its softmaxes, in whatever way they are asked for."""
    autoencoder = load_calm(models / "calm-4").autoencoder
    torch.manual_seed(0)
    backbone = load_calm(models / "calm-4").config.backbone_config
    model = CalmForCausalLM(CalmConfig(backbone, autoencoder.config, head="chain")).eval()
    for weight in model.head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    ids = torch.arange(3, 15)[None]
    hidden, chunks = model.hidden_states(ids[:, :8]), model.chunks(ids)[:, 1:]
    nats = chunk_nats(model, hidden, chunks, 5, RowNoise([0]))
    logs = (model.chain_states(hidden, chunks) @ model.words.T).log_softmax(-1)
    torch.testing.assert_close(nats, -logs.gather(-1, chunks[..., None])[..., 0], rtol=1e-4, atol=1e-5)
    found, _ = continuation_nats(model, ids[0, :4].tolist(), ids[0, 4:].tolist(), 3, RowNoise([0]), 2)
    assert found == pytest.approx(nats.sum().item(), rel=1e-4)
    shutil.copytree(models / "calm-4", tmp_path / "chain")
    model.config.update({"eos_token_id": 0, "pad_token_id": 1})
    model.save_pretrained(tmp_path / "chain")
    done = calm("evaluate", tmp_path / "chain", "--data", prepared, "--split", "train", "--json")
    assert done.returncode == 0, done.stderr
    (measures,) = json.loads(done.stdout)["models"].values()
    assert measures["cross_entropy"] > 0
    assert "cross_entropy_bound" not in measures
