"""Progress lines, which are displayed only on a terminal, rendered on an emulated one."""

import io

import pytest
from rich.console import Console

from calm import console
from calm.data.prepare import Counts
from calm.data.prepare import Report as PreparationReport
from calm.train.loop import Report


@pytest.fixture
def terminal(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(console, "stderr", Console(file=file, force_terminal=True, width=160))
    return file


def test_training_progress(terminal):
    with console.training_progress(steps=200) as report:
        report(Report(1, 200, {"loss": 9.5}))
        metrics = {"loss": 8.25, "tokens_per_second": 12345.6, "share_of_peak": 0.5, "score": 0.9}
        report(Report(100, 200, metrics))
    for part in ("step 100/200", "loss 8.2500", "12,346 tokens/s", "50% of peak", "score 0.90000"):
        assert part in terminal.getvalue()


def test_preparation_progress(terminal):
    with console.preparation_progress() as report:
        report(PreparationReport("training the tokenizer", Counts(), 2_000_000, None))
        report(PreparationReport("tokenizing", Counts(documents=3, tokens=1000), 500, 1000))
        report(PreparationReport("tokenizing", Counts(documents=7, tokens=5000), 900, 1000))
    for part in ("training the tokenizer", "tokenizing", "7 documents", "5,000 tokens", "tokens/s"):
        assert part in terminal.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_of_other_ranks_prints_nothing(monkeypatch, is_terminal):
    file = io.StringIO()
    monkeypatch.setattr(console, "stderr", Console(file=file, force_terminal=is_terminal, quiet=True))
    with console.training_progress(steps=5) as report:
        report(Report(5, 5, {"loss": 1.0}))
    assert file.getvalue() == ""
