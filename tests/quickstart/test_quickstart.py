"""`calm quickstart` end to end, with interruption and resumption; errors are one-line messages."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calm.errors import UserError
from calm.files import locked_directory
from calm.quickstart.plan import STAGES, Plan

WORDS = [
    "the",
    "light",
    "and",
    "darkness",
    "of",
    "every",
    "day",
    "that",
    "was",
    "upon",
    "all",
    "waters",
    "which",
    "he",
    "made",
    "good",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """About 250 kB of random sentences."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    sentences = (" ".join(draw.choices(WORDS, k=draw.randint(5, 12))).capitalize() + "." for _ in range(6_000))
    path.write_text("\n\n".join(sentences))
    return path


def test_interrupted_quickstart_is_resumed(text, tmp_path):
    output = tmp_path / "quick start"
    command = [sys.executable, "-m", "calm", "quickstart", "--minutes", "0.01", "--data", str(text)]
    command += ["--output", str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        while not (output / "runs" / "calm" / "config.yaml").exists():
            assert first.poll() is None, first.communicate()[1]
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=120)
    if first.returncode:
        assert first.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), (
            errors
        )  # negative: interrupted before training
        assert "Traceback" not in errors
    trained = (output / "runs" / "autoencoder" / "run.json").stat().st_mtime_ns
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (output / "runs" / "autoencoder" / "run.json").stat().st_mtime_ns == trained  # not trained again
    assert "[6/6]" in done.stderr
    assert "calm generate" in done.stdout
    assert "calm evaluate" in done.stdout
    page = (output / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert page.count("<mark>") > 20
    for title in ("Learning", "BrierLM", "Temperature", "Samples", "Cost", "Next"):
        assert f"<h2>{title}</h2>" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)  # self-contained
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    results = json.loads(again.stdout)
    assert results["scores"]["models"].keys() == {"calm", "transformer"}
    assert {sample["temperature"] for sample in results["samples"]} == {1.0, 0.5}
    assert {point["temperature"] for point in results["tradeoff"]} >= {1.0, 0.5}
    other = subprocess.run([*command, "--seed", "1"], capture_output=True, text=True, timeout=120)
    assert other.returncode == 2
    assert "other settings (seed)" in other.stderr


def test_minutes_scale_every_stage():
    short, long = Plan(5), Plan(15)
    for stage in STAGES:
        assert long.steps(stage) == pytest.approx(3 * short.steps(stage), rel=0.01)
    assert short.run("calm", Path("x")).train.steps == short.steps("calm")
    assert Plan(0.001).steps("calm") == 20


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), float("inf")])
def test_invalid_minutes(minutes):
    with pytest.raises(UserError, match="must be above 0"):
        Plan(minutes)


def test_error_messages(calm, text, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("In the beginning.\n" * 10)
    file = tmp_path / "file"
    file.write_text("x")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("x")
    for arguments, message in (
        (["--minutes", "0"], "--minutes must be above 0, not 0"),
        (["--minutes", "1e9"], "more than a day"),
        (["--data", short], "180 bytes; quickstart needs at least 200,000"),
        (["--data", tmp_path / "absent.txt"], "absent.txt"),
        (["--output", file], "is a file"),
        (["--output", foreign], "not created by calm quickstart (thesis.txt); choose another --output"),
    ):
        done = calm("quickstart", "--output", tmp_path / "out", *arguments)
        assert done.returncode == 2, arguments
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    with locked_directory(tmp_path / "busy", "calm quickstart"):
        done = calm("quickstart", "--output", tmp_path / "busy")
    assert done.returncode == 2
    assert "another calm quickstart is writing" in done.stderr
    if os.geteuid():  # root can write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        done = calm("quickstart", "--output", tmp_path / "locked" / "out")
        assert done.returncode == 2
        assert "cannot write" in done.stderr
