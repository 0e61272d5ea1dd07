"""The README matches the package: its commands run, its make targets and files exist."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def test_commands_run(calm, tmp_path):
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("calm ")]
    assert len(commands) >= 2
    for command in commands:
        done = calm(*shlex.split(command, comments=True)[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_make_targets_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    documented = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= documented <= targets


def test_listed_files_exist():
    tree = (ROOT / "README.md").read_text().partition("src/calm/\n")[2].partition("```")[0]
    assert tree
    for line in tree.splitlines():
        name = line.split()[0] if line.split() else ""
        if line.startswith("  ") and name:
            assert (ROOT / "src" / "calm" / name).exists(), name
