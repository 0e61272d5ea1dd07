"""`calm generate` end to end."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest


@pytest.fixture
def generate(calm, models):
    def run(*arguments, model="calm-4", **kwargs):
        return calm("generate", models / model, *arguments, **kwargs)

    return run


def test_seed_determines_the_text(generate):
    first, same, other = (generate("the quick", "--seed", seed, "--max-new-tokens", 12) for seed in (1, 1, 2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == same.stdout
    assert first.stdout != other.stdout
    assert not first.stderr


def test_prompt_from_stdin_and_empty_prompt(generate):
    options = ["--max-new-tokens", 8]
    given, piped = generate("the quick", *options), generate("-", *options, input="the quick\n")
    assert given.stdout == piped.stdout
    empty = generate(*options)
    assert empty.returncode == 0
    assert empty.stdout.strip()


def test_json_reports_sampling_statistics(generate):
    options = ["--temperature", 0.5, "--num-candidates", 20, "--num-samples", 3, "--max-new-tokens", 10, "--json"]
    answer = json.loads(generate("the quick", *options, "--method", "batch").stdout)
    assert len(answer["texts"]) == 3
    assert all(text["tokens"] <= 10 for text in answer["texts"])
    assert answer["cost"]["draws"] == 20 * answer["cost"]["chunks"]
    assert all(0 < share <= 1 for text in answer["texts"] for share in text["agreement"])
    alone = json.loads(generate("the quick", *options, "--method", "batch", "--num-samples", 1).stdout)
    assert alone["texts"][0] == answer["texts"][0]


def test_show_chunks_prints_their_agreement(generate):
    done = generate("the quick", "--show-chunks", "--temperature", 0.3, "--num-candidates", 10, "--max-new-tokens", 8)
    assert done.stdout.count("%┃") == 2
    assert done.stdout.count("┃") <= 3  # the last one may follow an incomplete character, shown at the end


def test_text_ends_before_a_stop_string(generate):
    whole = generate("the quick", "--max-new-tokens", 24).stdout[:-1]
    stop = whole[5:7]
    assert generate("the quick", "--max-new-tokens", 24, "--stop", stop).stdout[:-1] == whole.partition(stop)[0]


def test_fallbacks_are_reported(generate):
    done = generate("the", "--temperature", 0.2, "--num-candidates", 1, "--method", "batch", "--max-new-tokens", 8)
    assert done.returncode == 0
    assert "the temperature had little or no effect" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--temperature", 1e-10], "above 0 and at most 1, not 1e-10"),
        (["x", "--temperature", 2], "at most 1, not 2.0"),
        (["x", "--temperature", "nan"], "not nan"),
        (["x", "--method", "greedy"], "'--method'"),
        (["x", "--max-new-tokens", -3], "'--max-new-tokens'"),
        (["x", "--max-new-tokens", 100_000], "exceed the backbone's 32 positions"),
        (["word " * 400], "exceed the backbone's 32 positions"),
        (["x", "--num-candidates", 0], "'--num-candidates'"),
        (["x", "--top-p", 0.5], "needs token probabilities"),
        (["x", "--stop", ""], "must not be empty"),
        (["x", "--show-chunks", "--json"], "give one of them"),
    ],
)
def test_invalid_arguments(generate, arguments, message):
    done = generate(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_kinds_of_model_directories(generate, tmp_path):
    assert "holds an autoencoder, not a CALM language model" in generate("x", model="autoencoder").stderr
    assert generate("x", model="softmax").returncode == 0  # a Transformer generates, too
    assert "is not a model directory" in generate("x", model=tmp_path).stderr


def test_ctrl_c_ends_a_stream_cleanly(models):
    command = [sys.executable, "-m", "calm", "generate", models / "calm-1", "the", "--method", "exact"]
    slow = ["--temperature", "0.02", "--max-new-tokens", "30"]  # fifty equal draws are rare
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([*command, *slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + 120
    while not process.stdout.read(1) and time.monotonic() < deadline:
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the process ended before the signal")
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_exact_sampling_that_reaches_its_limit_of_draws_warns(calm):
    done = calm(
        "generate",
        "bundled",
        "--method",
        "exact",
        "--temperature",
        "0.3",
        "--num-candidates",
        "2",
        "--max-new-tokens",
        "4",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("of draws and are approximate; allow more with num_candidates") == 1
    assert "stopped after" not in done.stderr
