"""Reconstruction metrics against direct counts, and `calm evaluate` for autoencoders."""

import json

import numpy as np
import pytest
import torch

from calm.autoencoder import Autoencoder, AutoencoderConfig
from calm.checkpoint import save_model
from calm.data.chunks import ChunkedStream
from calm.data.loader import evaluation_batches
from calm.data.shards import PreparedData
from calm.evaluate.reconstruction import evaluate_reconstruction


@pytest.fixture(scope="module")
def model_and_stream(prepared):
    torch.manual_seed(0)
    data = PreparedData(prepared)
    sizes = {"latent_size": 8, "hidden_size": 16, "intermediate_size": 16}
    model = Autoencoder(AutoencoderConfig(vocab_size=data.tokenizer.vocab_size, chunk_size=4, **sizes))
    return model.eval(), ChunkedStream(data.split("train"), 4, 20, data.tokenizer.pad_token_id)


def test_every_token_is_counted_once(model_and_stream):
    model, stream = model_and_stream
    found = evaluate_reconstruction(model, evaluation_batches(stream, 3))
    assert found["tokens"] == len(stream.stream)
    assert found["chunks"] == -(-len(stream.stream) // 4)


def test_accuracy_from_the_mean_matches_a_direct_count(model_and_stream):
    model, stream = model_and_stream
    found = evaluate_reconstruction(model, evaluation_batches(stream, 5))
    ids = stream.stream[: len(stream.stream)].astype(np.int64)
    padded = np.concatenate([ids, np.full(-len(ids) % 4, stream.pad_token_id)])
    chunks = torch.from_numpy(padded).view(-1, 4)
    with torch.no_grad():
        posterior = model.encode(chunks)
        right = (model.decode(posterior.mean).argmax(-1) == chunks).flatten()[: len(ids)]
    assert found["token_accuracy_from_mean"] == pytest.approx(right.double().mean().item())
    assert found["mean_sigma"] == pytest.approx(posterior.std.mean().item(), rel=1e-5)
    bits = posterior.kl().sum(-1).mean().item() / np.log(2)
    assert found["kl_bits_per_chunk"] == pytest.approx(bits, rel=1e-5)


def test_metrics_do_not_depend_on_batches_and_processes(model_and_stream):
    model, stream = model_and_stream
    whole = evaluate_reconstruction(model, evaluation_batches(stream, 4))
    again = evaluate_reconstruction(model, evaluation_batches(stream, 7))
    assert whole["token_accuracy"] == again["token_accuracy"]
    assert whole["robustness"] == again["robustness"]
    counts = [evaluate_reconstruction(model, evaluation_batches(stream, 4, r, 3))["tokens"] for r in range(3)]
    assert sum(counts) == whole["tokens"]


def test_collapsed_dimensions_are_counted(model_and_stream):
    model, stream = model_and_stream
    with torch.no_grad():  # the posterior of dimensions 1 and 5 becomes the prior
        for row in (1, 5, 8 + 1, 8 + 5):
            model.encoder.posterior.weight[row] = 0
            model.encoder.posterior.bias[row] = 0
        model.encoder.posterior.bias[[0, 2, 3, 4, 6, 7]] = 1.0
    assert evaluate_reconstruction(model, evaluation_batches(stream, 4))["collapsed_dimensions"] == 2


def test_command(calm, model_and_stream, prepared, tmp_path):
    model, _ = model_and_stream
    save_model(model, tmp_path / "model")
    PreparedData(prepared).tokenizer.save(tmp_path / "model")
    done = calm("evaluate", tmp_path / "model", "--data", prepared, "--output", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out" / "reconstruction.json").read_text())
    assert (tmp_path / "out" / "robustness.png").stat().st_size > 5000
    assert found["robustness"][0]["token_accuracy"] == found["token_accuracy"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: (m / "config.json").unlink(), "is not a model directory"),
        (lambda m: (m / "model.safetensors").write_bytes(b"junk"), "cannot be read"),
        (lambda m: (m / "config.json").write_text("{"), "cannot be read"),
    ],
)
def test_damaged_models(calm, model_and_stream, prepared, tmp_path, damage, message):
    model, _ = model_and_stream
    save_model(model, tmp_path / "model")
    damage(tmp_path / "model")
    done = calm("evaluate", tmp_path / "model", "--data", prepared)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_tokenizer_mismatch(calm, model_and_stream, prepared, tmp_path):
    from calm.data.tokenizer import train_bpe

    model, _ = model_and_stream
    save_model(model, tmp_path / "model")
    train_bpe(["other words"], 270).save(tmp_path / "model")
    done = calm("evaluate", tmp_path / "model", "--data", prepared)
    assert done.returncode == 2
    assert "was prepared with another tokenizer" in done.stderr
