"""The commands that a quickstart suggests can be pasted, also where the environment is not activated."""

from pathlib import Path

import pytest

from calm.quickstart import report


@pytest.mark.parametrize(
    ("called", "installed", "expected"),
    [
        (".venv/bin/calm", None, ".venv/bin/calm"),
        (".venv/bin/calm", "/usr/bin/calm", "calm"),
        ("/usr/lib/python3/calm/__main__.py", None, "calm"),
    ],
)
def test_suggested_commands(called, installed, expected, monkeypatch):
    monkeypatch.setattr("sys.argv", [called, "quickstart"])
    monkeypatch.setattr(report, "which", lambda name: installed)
    lines = report.next_commands(Path("demo")).splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"{expected} ") for line in lines)
