"""The bundled model."""

import json
import re

from pybible import Bible

from calm.checkpoint import BUNDLED, resolve_model_dir


def test_size_and_provenance(tmp_path, monkeypatch):
    from pathlib import Path

    directory = resolve_model_dir(Path(BUNDLED))
    assert sum(path.stat().st_size for path in directory.iterdir()) < 20_000_000
    run = json.loads((directory / "run.json").read_text())
    assert run["config"]["language_model"]["head"] == "chain"
    assert run["summary"]["brier_1"] > 10
    monkeypatch.chdir(tmp_path)
    (tmp_path / BUNDLED).mkdir()
    assert resolve_model_dir(Path(BUNDLED)) == Path(BUNDLED)  # a local directory of that name takes precedence


def test_generates_words_of_its_corpus(calm, tmp_path):
    words = set(re.findall(r"[a-z]+", " ".join(Bible).lower()))
    done = calm("generate", BUNDLED, "And God said", "--temperature", 0.5, "--num-samples", 4, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    generated = [w for text in json.loads(done.stdout)["texts"] for w in re.findall(r"[a-z]+", text["text"].lower())]
    assert len(generated) > 150
    assert sum(word in words for word in generated) > 0.9 * len(generated)
    assert len(set(generated)) > 40  # samples are diverse
