"""End-to-end tests of the command line: help, errors, output of `calm prepare`."""

import json

import pytest

from calm.cli import app


def test_help_lists_every_command_and_each_has_an_example(calm):
    overview = calm("--help").stdout
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert name in overview
        assert "Example: calm " in " ".join(calm(name, "--help").stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare"], "Missing argument 'sources'"),
        (["nonsense"], "No such command 'nonsense'"),
        (["prepare", "no.txt", "--tokenizer", "bpe:300", "--output", "x"], "no such file: no.txt"),
        (["prepare", "embedded", "--tokenizer", "bpe:300", "--output", "x", "--workers", "ten"], "'--workers'"),
        (
            ["prepare", "embedded", "--tokenizer", "bpe:300", "--output", "x", "--resume", "--overwrite"],
            "give one of them",
        ),
        (["config", "laptop-autoencode"], "did you mean laptop-autoencoder?"),
        (
            ["config", "toy-autoencoder", "--set", "data.chunk_sise=2"],
            "unknown key data.chunk_sise; did you mean chunk_size?",
        ),
    ],
)
def test_user_errors_are_one_line_with_exit_code_2(calm, tmp_path, arguments, message):
    done = calm(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("calm: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback_in_any_position(calm):
    for arguments in (["--debug", "config", "nope"], ["config", "nope", "--debug"]):
        done = calm(*arguments)
        assert done.returncode == 2
        assert "Traceback" in done.stderr


def test_prepare_prints_only_json(calm, jsonl, tmp_path):
    done = calm("prepare", jsonl, "--tokenizer", "bpe:300", "--output", tmp_path / "d", "--workers", 1, "--json")
    assert json.loads(done.stdout)["vocab_size"] == 300


def test_prepare_prints_a_summary(calm, jsonl, tmp_path):
    options = ["--validation-share", 1e-9]
    done = calm("prepare", jsonl, "--tokenizer", "bpe:300", "--output", tmp_path / "d", "--workers", 1, *options)
    assert done.returncode == 0
    assert "no document fell into the validation split" in done.stderr
    assert "train" in done.stdout
    assert f"Ready in {tmp_path / 'd'}" in done.stdout


def test_read_only_output(calm, jsonl, tmp_path):
    done = calm("prepare", jsonl, "--tokenizer", "bpe:300", "--output", "/proc/calm/data")
    assert done.returncode == 2
    assert "cannot write to /proc/calm/data" in done.stderr


def test_methods_on_the_command_line_are_those_of_the_sampler():
    from typing import get_args

    from calm.cli import Method
    from calm.generate import sampler

    assert get_args(Method) == get_args(sampler.Method) == tuple(sampler.METHODS)
