"""`calm reproduce` end to end: each run is trained once, resumed if interrupted, and errors are one-line messages."""

import errno
import json
import re
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from calm import __version__
from calm.console import StageScreen
from calm.errors import UserError
from calm.evaluate.brier_lm import BrierLM
from calm.files import locked_directory
from calm.paper import reproduce as module
from calm.paper.experiments import EXPERIMENTS
from calm.paper.measures import scores
from calm.paper.report import write_experiment, write_report
from calm.paper.reproduce import reproduction
from calm.paper.scales import SCALES
from calm.train.loop import Diverged, TrainingStopped

TOY = SCALES["toy"]
INPUT = EXPERIMENTS["model-input"]


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory):
    """An output directory with one experiment."""
    output = tmp_path_factory.mktemp("reproduction") / "toy"
    with reproduction(TOY, output, StageScreen()) as reproduced:
        reproduced.run(INPUT)
        assert write_experiment(reproduced, INPUT)
        write_report(reproduced)
    return output


@pytest.fixture
def copy(output_dir, tmp_path):
    return shutil.copytree(output_dir, tmp_path / "toy")


def test_output_files(output_dir):
    stored = json.loads((output_dir / "results.json").read_text())
    assert stored["scale"] == "toy"
    rows = stored["experiments"]["model-input"]["rows"]
    assert [row["label"] for row in rows] == ["discrete", "continuous", "both"]
    for row in rows:
        assert set(row["values"]["brier_1"]) == {"value", "low", "high", "by_seed"}
    assert (
        str(output_dir) not in (output_dir / "results.json").read_text()
    )  # no machine paths: the file may be committed
    table = (output_dir / "model-input.md").read_text()
    assert "21.81" in table  # the paper's value
    assert "estimated from 3 seeds of the base model" in table
    seeds = [measure["settings"].get("seed", 0) for measure in stored["measures"].values()]
    assert sorted(seeds) == [0, 0, 0, 1, 2]
    assert [len(row["values"]["brier_1"]["by_seed"]) for row in rows] == [
        3,
        1,
        1,
    ]  # all seeds of the base model are used
    report = (output_dir / "report.html").read_text()
    for part in ("calm train characters-calm", "model_input", "data:image/png", __version__):
        assert part in report, part
    assert "http" not in re.sub(r"data:image/png[^\"]*", "", report)  # self-contained


def test_scores_match_calm_evaluate(copy, calm):
    scale, run = replace(TOY, most_tokens=None, samples=2), TOY.calm()
    with reproduction(scale, copy, StageScreen()) as reproduced:
        reproduced._measure(scores(run, scale))
        answer = reproduced.results.find(scores(run, scale))
        assert answer is not None
        brier = BrierLM.from_json(answer["sums"]).compute()
        model = reproduced.directory(run) / "model"
    done = calm("evaluate", model, "--data", copy / "data", "--split", "test", "--context", TOY.context, "--json")
    assert done.returncode == 0, done.stderr
    (alone,) = json.loads(done.stdout)["models"].values()
    assert alone["positions"] == brier["positions"]
    for name in ("brier_1", "brier_4", "collision_2"):
        assert alone[name]["value"] == pytest.approx(brier[name].value, abs=1e-5)
        assert alone[name]["low"] == pytest.approx(brier[name].low, abs=1e-5)


def test_stored_results_are_reused(output_dir, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("already done")

    for name in ("train", "evaluate", "prepare"):
        monkeypatch.setattr(module, name, fail)
    before = {path: path.stat().st_mtime_ns for path in output_dir.iterdir()}
    with reproduction(TOY, output_dir, StageScreen()) as reproduced:
        reproduced.run(INPUT)
        assert not write_experiment(reproduced, INPUT)
    assert {path: path.stat().st_mtime_ns for path in output_dir.iterdir()} == before


def test_stored_results_suffice_without_runs(copy, monkeypatch):
    """As in a fresh clone: results.json is present, runs and data are not."""
    for name in ("runs", "data"):
        shutil.rmtree(copy / name)
    (copy / "model-input.png").unlink()
    monkeypatch.setattr(module, "train", None)
    with reproduction(TOY, copy, StageScreen()) as reproduced:
        write_report(reproduced)  # the figure is missing
        assert "data:image/png" in (copy / "report.html").read_text()
        reproduced.run(INPUT)
        assert write_experiment(reproduced, INPUT)
    assert (copy / "model-input.png").exists()


def test_report_skips_experiments_with_pending_measures(copy):
    """As with the results of an older version with fewer measures."""
    with reproduction(TOY, copy, StageScreen()) as reproduced:
        write_report(reproduced)
        assert 'id="model-input"' in (copy / "report.html").read_text()
        seed = reproduced._repeats(INPUT)[-1]
        del reproduced.results.measures[seed.key(reproduced.data_digest)]
        write_report(reproduced)
    assert 'id="model-input"' not in (copy / "report.html").read_text()


def test_longer_run_extends_shorter_run_with_identical_weights(copy, tmp_path, monkeypatch):
    half, whole = (TOY.calm().until(share) for share in (0.5, 1.0))
    trained = []
    real = module.train

    def watched(config, directory, **kwargs):
        trained.append(sorted(path.name for path in directory.glob("checkpoints/*")))
        return real(config, directory, **kwargs)

    monkeypatch.setattr(module, "train", watched)
    weights = []
    for runs in ((half, whole), (whole,)):
        with reproduction(TOY, copy, StageScreen()) as reproduced:
            for run in runs:
                reproduced._train(run)
            weights.append(load_file(reproduced.directory(whole) / "model" / "model.safetensors"))
            for run in runs:
                shutil.rmtree(reproduced.directory(run))
    assert trained == [[], ["step-00000010"], []]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_interrupted_run_is_continued_with_resume(copy, monkeypatch):
    run = TOY.calm({"language_model.alpha": 1.5})
    real = module.train

    def stopped(*args, **kwargs):
        real(*args, **kwargs)
        raise TrainingStopped("stopped: saved at step 20", 15)

    with reproduction(TOY, copy, StageScreen()) as reproduced:
        directory = reproduced.directory(run)
        monkeypatch.setattr(module, "train", stopped)
        with pytest.raises(TrainingStopped, match="repeat the command with --resume to continue"):
            reproduced._train(run)
        shutil.rmtree(directory / "model")
        monkeypatch.setattr(module, "train", real)
        with pytest.raises(UserError, match="unfinished run; continue it with --resume"):
            reproduced._train(run)
    with reproduction(TOY, copy, StageScreen(), resume=True) as reproduced:
        reproduced._train(run)
    assert (directory / "model" / "config.json").exists()


def test_divergence_is_stored_as_a_result(copy, monkeypatch):
    def diverge(*_, **__):
        raise Diverged("10 steps in a row had a loss that is not finite")

    measure = scores(TOY.calm({"language_model.alpha": 0.5}), TOY)
    with reproduction(TOY, copy, StageScreen()) as reproduced:
        monkeypatch.setattr(module, "train", diverge)
        reproduced._measure(measure)
        answer = reproduced.results.find(measure)
    assert answer == {"failed": "10 steps in a row had a loss that is not finite"}
    assert "10 steps" in (copy / "results.json").read_text()


def test_output_of_another_version(copy):
    text = (copy / "results.json").read_text()
    (copy / "results.json").write_text(text.replace(f'"calm": "{__version__}"', '"calm": "0.0.1"', 1))
    with reproduction(TOY, copy, StageScreen()) as reproduced:  # finished runs are reused
        assert reproduced.results.created_by == "0.0.1"
    (copy / "runs" / "half").mkdir()
    with (
        pytest.raises(UserError, match=r"unfinished runs of calm 0.0.1 \(half\)"),
        reproduction(TOY, copy, StageScreen()),
    ):
        pass
    (copy / "results.json").write_text(text.replace('"format": 1', '"format": 99', 1))
    with pytest.raises(UserError, match="has format 99, not 1"), reproduction(TOY, copy, StageScreen()):
        pass
    (copy / "results.json").write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match="cannot read"), reproduction(TOY, copy, StageScreen()):
        pass


def test_full_disk(copy, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = (copy / "results.json").read_bytes()
    monkeypatch.setattr("calm.paper.results.write_atomic", full)
    with (
        pytest.raises(UserError, match="no space left on the device of .*; free some space and continue with --resume"),
        reproduction(TOY, copy, StageScreen()) as reproduced,
    ):
        reproduced.run(EXPERIMENTS["main"])
    assert (copy / "results.json").read_bytes() == before


def test_bad_input(calm, tmp_path, output_dir):
    (tmp_path / "file").write_text("")
    cases = [
        (["alhpa"], "did you mean alpha"),
        (["alpha", "--scale", "labtop"], "did you mean laptop"),
        (["alpha", "--chunk-size", 3], "one of 1, 2, 4, 8, not 3"),
        (["temperature-tradeoff", "--chunk-size", 2], "does not support --chunk-size 2; use 4"),
        (["alpha", "--output", tmp_path / "file"], "is a file, not a directory"),
        (["alpha", "--scale", "laptop", "--output", output_dir], "has scale 'toy', not 'laptop'"),
        (["alpha", "--data", tmp_path, "--output", tmp_path / "new"], "contains no prepared data"),
        (
            ["main", "--scale", "paper", "--output", tmp_path / "paper"],
            "contains no prepared data; create it with",
        ),
    ]
    for arguments, message in cases:
        done = calm("reproduce", *arguments, cwd=tmp_path)
        assert done.returncode == 2, (arguments, done.stderr)
        assert message in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr


def test_output_directory_is_locked(output_dir, calm):
    with locked_directory(output_dir, "a test"):
        done = calm("reproduce", "model-input", "--output", output_dir)
    assert done.returncode == 2
    assert "another calm reproduce is writing" in done.stderr


def test_json_plan_and_list(output_dir, calm):
    done = calm("reproduce", "model-input", "--output", output_dir, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["model-input"]["verdicts"]) == 3
    planned = calm("reproduce", "main", "--scale", "paper", "--plan", cwd=output_dir)
    assert planned.returncode == 0, planned.stderr
    assert [line.split()[:3] for line in planned.stdout.splitlines()] == [
        ["calm", "train", f"paper-{name}"]
        for name in ("transformer-s", "transformer-m", "transformer-l", "autoencoder-k4", "calm-m", "calm-l", "calm-xl")
    ]
    listed = calm("reproduce", "list")
    assert all(name in listed.stdout for name in EXPERIMENTS)
