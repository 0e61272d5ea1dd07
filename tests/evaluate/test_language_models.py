"""`calm evaluate` for language models: printed and saved output, comparisons, processes, and invalid input."""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calm.checkpoint import load_transformer
from calm.data.shards import PreparedData
from calm.data.tokenizer import load_tokenizer, train_bpe
from calm.distributed import World
from calm.errors import ConfigError, DataError, UserError
from calm.evaluate.language_models import Options, evaluate_language_models

SINGLE = World(0, 1, torch.device("cpu"))


def evaluate(models, data, split="train", **options):
    return evaluate_language_models([*models], data, split, Options(**options), SINGLE)


def test_command_compares_models(models, prepared, calm, tmp_path):
    chosen = [models / "calm-4", models / "softmax"]
    shown = calm("evaluate", *chosen, "--data", prepared, "--split", "train", "--output", tmp_path / "out")
    assert shown.returncode == 0, shown.stderr
    for part in ("BrierLM", "Brier-4", "accuracy", "collision", "bits per byte", "Differences", "multiples of 4"):
        assert part in shown.stdout, part
    kept = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert (tmp_path / "out" / "scores.png").read_bytes().startswith(b"\x89PNG")
    printed = calm("evaluate", *chosen, "--data", prepared, "--split", "train", "--json")
    assert json.loads(printed.stdout) == kept == json.loads(json.dumps(evaluate(chosen, prepared)))
    one, other = kept["models"].values()
    assert one["positions"] == other["positions"]
    difference = kept["differences"]["calm-4 - softmax"]["brier_1"]
    assert difference["value"] == pytest.approx(one["brier_1"]["value"] - other["brier_1"]["value"])
    assert other["chunk_size"] is None
    assert "cross_entropy" not in one


def test_two_processes_give_the_scores_of_one(models, prepared):
    command = [models / "calm-2", models / "softmax", "--data", prepared, "--split", "train", "--json"]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "calm"]
    two = subprocess.run([*start, "evaluate", *map(str, command)], capture_output=True, text=True, timeout=300)
    assert two.returncode == 0, two.stderr
    found, one = json.loads(two.stdout), evaluate([models / "calm-2", models / "softmax"], prepared)
    for name, measures in one["models"].items():
        got = found["models"][name]
        assert got["positions"] == measures["positions"]
        for key in ("brier_1", "accuracy_1", "collision_1", "collision_2"):  # up to the order of summation
            assert got[key]["value"] == pytest.approx(measures[key]["value"], rel=1e-4, abs=1e-6), (name, key)


def test_bf16_is_close_to_fp32(models, prepared):
    for name in ("calm-2", "softmax"):  # both are scored by branches, which are checked before the weights are rounded
        rough, exact = (evaluate([models / name], prepared, dtype=dtype)["models"][name] for dtype in ("bf16", "fp32"))
        assert rough["accuracy_1"]["value"] == pytest.approx(exact["accuracy_1"]["value"], rel=0.1, abs=0.5)


def test_cross_entropy_is_that_of_the_model(models, prepared):
    measures = evaluate([models / "softmax"], prepared, context=64)["models"]["softmax"]
    model, data = load_transformer(models / "softmax"), PreparedData(prepared)
    stream, nats, count = data.split("train"), 0.0, 0
    for number in range(len(stream.document_lengths)):
        first, last = stream.document_range(number)
        ids = torch.from_numpy(np.array(stream[first:last], dtype=np.int64))
        for begin in range(0, len(ids) - 1, 64):
            window = ids[begin : begin + 65]
            with torch.no_grad():
                logits = model.logits(window[None, :-1])[0]
            nats += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    assert measures["cross_entropy"] == pytest.approx(nats / count, rel=1e-4)
    assert measures["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-3)
    assert count == len(stream) - len(stream.document_lengths)  # all but the first of each document
    split = data.manifest["splits"]["train"]
    assert measures["bits_per_byte"] == pytest.approx(
        nats / count * len(stream) / split["bytes"] / math.log(2), rel=1e-4
    )
    beside = evaluate([models / "softmax", models / "calm-4"], prepared, context=64)["models"]["softmax"]
    for name in ("cross_entropy", "bits_per_byte"):  # independent of the other models
        assert beside[name] == measures[name]


def test_chunk_sizes_that_are_not_multiples_of_each_other(models, prepared):
    answer = evaluate([models / "calm-3", models / "calm-4"], prepared)
    assert "multiples of 12" in answer["positions"]
    assert answer["context"] % 12 == 0


@pytest.mark.parametrize("positions", ["shared", "own", "every"])
def test_positions_are_named_and_compared_if_they_are_the_same(models, prepared, positions):
    answer = evaluate([models / "calm-1", models / "calm-4"], prepared, positions=positions)
    counts = [measures["positions"] for measures in answer["models"].values()]
    assert (counts[0] == counts[1]) == (positions != "own") == bool(answer["differences"])
    assert {"shared": "multiples of 4", "own": "own chunk boundaries", "every": "every token"}[positions] in answer[
        "positions"
    ]


def test_more_samples_give_smaller_errors(models, prepared):
    """For the collisions, which depend only on the samples."""
    few, many = (evaluate([models / "calm-4"], prepared, num_samples=n)["models"]["calm-4"] for n in (2, 32))
    assert many["collision_1"]["standard_error"] < 0.6 * few["collision_1"]["standard_error"]


def test_text_file(models, prepared, tmp_path, texts):
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:5]))
    answer = evaluate([models / "calm-4"], path, num_samples=2)
    tokenizer = load_tokenizer(str(models / "calm-4"))
    lengths = [len(tokenizer.encode(text)) + 1 for text in texts[:5]]
    starts = [s for length in lengths for s in range(4, length - 3, 4)]
    assert answer["models"]["calm-4"]["positions"] == len(starts)
    assert answer["split"] is None
    again = evaluate([models / "calm-4"], path, num_samples=2)
    assert again == answer  # bitwise


def test_undefined_score_is_reported(models, prepared, calm, tmp_path):
    out = tmp_path / "out"
    shown = calm("evaluate", models / "calm-4", "--data", prepared, "--split", "validation", "--output", out)
    assert shown.returncode == 0, shown.stderr
    assert "below 0" in shown.stdout
    assert (out / "scores.png").exists()


def test_invalid_arguments(models, prepared, calm, tmp_path):
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text("")
    short.write_text("a")
    cases = [
        ((models / "calm-4", "--data", empty), "no position was scored"),
        ((models / "calm-4", "--data", short), "no position was scored"),
        ((models / "calm-4",), "--data is missing"),
        ((models / "calm-4", "--data", tmp_path / "nowhere"), "no such file"),
        ((models / "autoencoder", models / "calm-4", "--data", prepared), "holds an autoencoder"),
        ((models / "calm-4", models / "calm-4", "--data", prepared), "named twice"),
        ((models / "calm-4", "--data", prepared, "--output", empty), "should name a directory"),
        ((models / "calm-4", "--data", prepared, "--limit", 3), "--limit is for a task"),
    ]
    for arguments, message in cases:
        failed = calm("evaluate", *arguments)
        assert failed.returncode == 2, failed.stderr
        assert message in failed.stderr
        assert "Traceback" not in failed.stderr


def test_invalid_options_and_data(models, prepared, tmp_path, texts):
    with pytest.raises(ConfigError, match="a context of 6 tokens should be a multiple of 4, at most 124"):
        evaluate([models / "calm-4"], prepared, context=6)
    with pytest.raises(ConfigError, match="at most 124"):
        evaluate([models / "calm-4"], prepared, context=128)
    with pytest.raises(ConfigError, match="at least 2 to measure collisions, not 1"):
        evaluate([models / "calm-4"], prepared, num_samples=1)
    with pytest.raises(DataError, match="valid"):
        evaluate([models / "calm-4"], prepared, split="valid")
    other = tmp_path / "other"
    shutil.copytree(models / "calm-4", other)
    train_bpe(texts, 300).save(other)
    with pytest.raises(DataError, match="prepared with another tokenizer"):
        evaluate([other], prepared)
    with pytest.raises(DataError, match="different tokenizers"):
        evaluate([models / "calm-4", other], prepared)


def test_tokenizer_with_more_tokens_than_the_model(models, tmp_path, texts):
    other, path = tmp_path / "other", tmp_path / "some.txt"
    shutil.copytree(models / "softmax", other)
    train_bpe([*texts, "".join(map(chr, range(0x400, 0x480))) * 9], 500).save(other)
    path.write_text("".join(map(chr, range(0x400, 0x480))))
    with pytest.raises(
        DataError,
        match=r"token id 499 of the text is out of range: .* entries; the tokenizer in its directory is not its own",
    ):
        evaluate([other], path)


def test_damaged_weights(models, prepared, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(models / "calm-4", damaged)
    weights = load_file(damaged / "model.safetensors")
    weights["head.latent.bias"][0] = float("nan")
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="are not finite: head.latent.bias has NaN or infinite values"):
        evaluate([damaged], prepared)
