"""`calm generate` as a user meets it."""

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


def test_same_seed_same_text(generate):
    first, same, other = (generate("the quick", "--seed", seed, "--max-new-tokens", 12) for seed in (1, 1, 2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == same.stdout
    assert first.stdout != other.stdout
    assert not first.stderr


def test_a_prompt_from_stdin_and_an_empty_one(generate):
    options = ["--max-new-tokens", 8]
    given, piped = generate("the quick", *options), generate("-", *options, input="the quick\n")
    assert given.stdout == piped.stdout
    begun = generate(*options)
    assert begun.returncode == 0
    assert begun.stdout.strip()


def test_json_tells_what_it_cost(generate):
    options = ["--temperature", 0.5, "--num-candidates", 20, "--num-samples", 3, "--max-new-tokens", 10, "--json"]
    answer = json.loads(generate("the quick", *options, "--method", "batch").stdout)
    assert len(answer["texts"]) == 3
    assert all(text["tokens"] <= 10 for text in answer["texts"])
    assert answer["cost"]["draws"] == 20 * answer["cost"]["chunks"]
    assert all(0 < share <= 1 for text in answer["texts"] for share in text["agreement"])
    alone = json.loads(generate("the quick", *options, "--method", "batch", "--num-samples", 1).stdout)
    assert alone["texts"][0] == answer["texts"][0]


def test_chunks_are_shown_with_their_agreement(generate):
    done = generate("the quick", "--show-chunks", "--temperature", 0.3, "--num-candidates", 10, "--max-new-tokens", 8)
    assert done.stdout.count("┃") == 2
    assert "%" in done.stdout


def test_a_stop_ends_the_text_before_it(generate):
    free = generate("the quick", "--max-new-tokens", 24).stdout[:-1]
    stop = free[5:7]
    assert generate("the quick", "--max-new-tokens", 24, "--stop", stop).stdout[:-1] == free.partition(stop)[0]


def test_falling_back_is_told(generate):
    done = generate("the", "--temperature", 0.2, "--num-candidates", 1, "--method", "batch", "--max-new-tokens", 8)
    assert done.returncode == 0
    assert "the temperature acted less or not at all" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--temperature", 0], "above 0 and at most 1, not 0.0"),
        (["x", "--temperature", 2], "at most 1, not 2.0"),
        (["x", "--temperature", "nan"], "not nan"),
        (["x", "--method", "greedy"], "'--method'"),
        (["x", "--max-new-tokens", -3], "'--max-new-tokens'"),
        (["x", "--max-new-tokens", 100_000], "more than the backbone's 32 positions"),
        (["word " * 400], "more than the backbone's 32 positions"),
        (["x", "--num-candidates", 0], "'--num-candidates'"),
        (["x", "--top-p", 0.5], "needs probabilities of tokens"),
        (["x", "--stop", ""], "must have a character"),
        (["x", "--show-chunks", "--json"], "give one of them"),
    ],
)
def test_mistakes(generate, arguments, message):
    done = generate(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_models_that_cannot_write(generate, tmp_path):
    assert "holds an autoencoder, not a CALM language model" in generate("x", model="autoencoder").stderr
    assert generate("x", model="softmax").returncode == 0  # a Transformer writes, too
    assert "is not a model directory" in generate("x", model=tmp_path).stderr


def test_ctrl_c_ends_a_stream_cleanly(models):
    command = [sys.executable, "-m", "calm", "generate", models / "calm-1", "the", "--method", "exact"]
    slow = ["--temperature", "0.02", "--max-new-tokens", "30"]  # hardly ever fifty draws of a kind
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([*command, *slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + 120
    while not process.stdout.read(1) and time.monotonic() < deadline:
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("it was done before the signal came")
    assert process.returncode == 130
    assert b"Traceback" not in err
