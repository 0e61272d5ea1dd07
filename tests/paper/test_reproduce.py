"""From a name to a report: trained once, continued, never repeated; and what cannot work, told in one sentence."""

import errno
import json
import re
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from calm import __version__
from calm.console import SilentScreen
from calm.errors import UserError
from calm.evaluate.brier_lm import BrierLM
from calm.files import claimed
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
def made(tmp_path_factory):
    """A directory with one experiment in it."""
    output = tmp_path_factory.mktemp("reproduction") / "toy"
    with reproduction(TOY, output, SilentScreen()) as found:
        found.run(INPUT)
        assert write_experiment(found, INPUT)
        write_report(found)
    return output


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / "toy")


def test_what_it_leaves(made):
    kept = json.loads((made / "results.json").read_text())
    assert kept["scale"] == "toy"
    rows = kept["experiments"]["model-input"]["rows"]
    assert [row["label"] for row in rows] == ["discrete", "continuous", "both"]
    for row in rows:
        assert set(row["values"]["brier_1"]) == {"value", "low", "high", "by_seed"}
    assert str(made) not in (made / "results.json").read_text()  # it may be kept in a repository
    table = (made / "model-input.md").read_text()
    assert "21.81" in table  # the paper's, beside ours
    assert "by 3 seeds of the base model" in table
    seeds = [kept["settings"].get("seed", 0) for kept in kept["measures"].values()]
    assert sorted(seeds) == [0, 0, 0, 1, 2]
    assert [len(row["values"]["brier_1"]["by_seed"]) for row in rows] == [3, 1, 1]  # the base model's are all used
    report = (made / "report.html").read_text()
    for part in ("calm train characters-calm", "model_input", "data:image/png", __version__):
        assert part in report, part
    assert "http" not in re.sub(r"data:image/png[^\"]*", "", report)  # nothing from outside


def test_the_scores_are_those_of_calm_evaluate(copy, calm):
    scale, run = replace(TOY, most_tokens=None, samples=2), TOY.calm()
    with reproduction(scale, copy, SilentScreen()) as found:
        found._measure(scores(run, scale))
        answer = found.results.find(scores(run, scale))
        assert answer is not None
        brier = BrierLM.from_json(answer["sums"]).compute()
        model = found.directory(run) / "model"
    done = calm("evaluate", model, "--data", copy / "data", "--split", "test", "--context", TOY.context, "--json")
    assert done.returncode == 0, done.stderr
    (alone,) = json.loads(done.stdout)["models"].values()
    assert alone["positions"] == brier["positions"]
    for name in ("brier_1", "brier_4", "collision_2"):
        assert alone[name]["value"] == pytest.approx(brier[name].value, abs=1e-5)
        assert alone[name]["low"] == pytest.approx(brier[name].low, abs=1e-5)


def test_nothing_is_done_twice(made, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("it was done already")

    for name in ("train", "take", "prepare"):
        monkeypatch.setattr(module, name, fail)
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    with reproduction(TOY, made, SilentScreen()) as found:
        found.run(INPUT)
        assert not write_experiment(found, INPUT)
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before


def test_results_are_enough(copy, monkeypatch):
    """As in a repository: the runs are gone, the numbers are there."""
    for name in ("runs", "data"):
        shutil.rmtree(copy / name)
    (copy / "model-input.png").unlink()
    monkeypatch.setattr(module, "train", None)
    with reproduction(TOY, copy, SilentScreen()) as found:
        write_report(found)  # of an experiment whose figure is not there
        assert "data:image/png" in (copy / "report.html").read_text()
        found.run(INPUT)
        assert write_experiment(found, INPUT)
    assert (copy / "model-input.png").exists()


def test_a_report_leaves_out_what_wants_more_by_now(copy):
    """Results of a version that measured less."""
    with reproduction(TOY, copy, SilentScreen()) as found:
        write_report(found)
        assert 'id="model-input"' in (copy / "report.html").read_text()
        seed = found._repeats(INPUT)[-1]
        del found.results.measures[seed.key(found.text)]
        write_report(found)
    assert 'id="model-input"' not in (copy / "report.html").read_text()


def test_a_longer_run_goes_on_from_a_shorter_one_to_the_same_weights(copy, tmp_path, monkeypatch):
    half, whole = (TOY.calm().until(share) for share in (0.5, 1.0))
    trained = []
    real = module.train

    def watched(config, directory, **kwargs):
        trained.append(sorted(path.name for path in directory.glob("checkpoints/*")))
        return real(config, directory, **kwargs)

    monkeypatch.setattr(module, "train", watched)
    weights = []
    for runs in ((half, whole), (whole,)):
        with reproduction(TOY, copy, SilentScreen()) as found:
            for run in runs:
                found._train(run)
            weights.append(load_file(found.directory(whole) / "model" / "model.safetensors"))
            for run in runs:
                shutil.rmtree(found.directory(run))
    assert trained == [[], ["step-00000010"], []]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_an_interrupted_run_is_continued_when_asked(copy, monkeypatch):
    run = TOY.calm({"language_model.alpha": 1.5})
    real = module.train

    def stopped(*args, **kwargs):
        real(*args, **kwargs)
        raise TrainingStopped("stopped: saved at step 20", 15)

    with reproduction(TOY, copy, SilentScreen()) as found:
        directory = found.directory(run)
        monkeypatch.setattr(module, "train", stopped)
        with pytest.raises(TrainingStopped, match="--resume goes on"):
            found._train(run)
        shutil.rmtree(directory / "model")
        monkeypatch.setattr(module, "train", real)
        with pytest.raises(UserError, match="unfinished run; --resume goes on"):
            found._train(run)
    with reproduction(TOY, copy, SilentScreen(), resume=True) as found:
        found._train(run)
    assert (directory / "model" / "config.json").exists()


def test_a_run_that_diverges_is_a_result(copy, monkeypatch):
    def diverge(*_, **__):
        raise Diverged("10 steps in a row had a loss that is not finite")

    measure = scores(TOY.calm({"language_model.alpha": 0.5}), TOY)
    with reproduction(TOY, copy, SilentScreen()) as found:
        monkeypatch.setattr(module, "train", diverge)
        found._measure(measure)
        answer = found.results.find(measure)
    assert answer == {"failed": "10 steps in a row had a loss that is not finite"}
    assert "10 steps" in (copy / "results.json").read_text()


def test_a_directory_of_another_version(copy):
    text = (copy / "results.json").read_text()
    (copy / "results.json").write_text(text.replace(f'"calm": "{__version__}"', '"calm": "0.0.1"', 1))
    with reproduction(TOY, copy, SilentScreen()) as found:  # what is finished stays
        assert found.results.begun_by == "0.0.1"
    (copy / "runs" / "half").mkdir()
    with (
        pytest.raises(UserError, match=r"unfinished runs of calm 0.0.1 \(half\)"),
        reproduction(TOY, copy, SilentScreen()),
    ):
        pass
    (copy / "results.json").write_text(text.replace('"format": 1', '"format": 99', 1))
    with pytest.raises(UserError, match="has format 99, not 1"), reproduction(TOY, copy, SilentScreen()):
        pass
    (copy / "results.json").write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match="cannot be read"), reproduction(TOY, copy, SilentScreen()):
        pass


def test_a_full_disk(copy, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = (copy / "results.json").read_bytes()
    monkeypatch.setattr("calm.paper.results.write_atomic", full)
    with (
        pytest.raises(UserError, match="no space is left for .*; make some, and go on with --resume"),
        reproduction(TOY, copy, SilentScreen()) as found,
    ):
        found.run(EXPERIMENTS["main"])
    assert (copy / "results.json").read_bytes() == before


def test_bad_input(calm, tmp_path, made):
    (tmp_path / "file").write_text("")
    cases = [
        (["alhpa"], "did you mean alpha"),
        (["alpha", "--scale", "labtop"], "did you mean laptop"),
        (["alpha", "--chunk-size", 3], "one of 1, 2, 4, 8, not 3"),
        (["temperature-tradeoff", "--chunk-size", 2], "chunks of 4 tokens"),
        (["alpha", "--output", tmp_path / "file"], "is a file, not a directory"),
        (["alpha", "--scale", "laptop", "--output", made], "has scale 'toy', not 'laptop'"),
        (["alpha", "--data", tmp_path, "--output", tmp_path / "new"], "holds no prepared text"),
        (
            ["main", "--scale", "paper", "--output", tmp_path / "paper"],
            "holds no prepared text; make it with",
        ),
    ]
    for arguments, message in cases:
        done = calm("reproduce", *arguments, cwd=tmp_path)
        assert done.returncode == 2, (arguments, done.stderr)
        assert message in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr


def test_two_at_once(made, calm):
    with claimed(made, "a test"):
        done = calm("reproduce", "model-input", "--output", made)
    assert done.returncode == 2
    assert "another calm reproduce is writing" in done.stderr


def test_the_command_shows_answers_and_plans(made, calm):
    done = calm("reproduce", "model-input", "--output", made, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["model-input"]["verdicts"]) == 3
    planned = calm("reproduce", "main", "--scale", "paper", "--plan", cwd=made)
    assert planned.returncode == 0, planned.stderr
    assert [line.split()[:3] for line in planned.stdout.splitlines()] == [
        ["calm", "train", f"paper-{name}"]
        for name in ("transformer-s", "transformer-m", "transformer-l", "autoencoder-k4", "calm-m", "calm-l", "calm-xl")
    ]
    listed = calm("reproduce", "list")
    assert all(name in listed.stdout for name in EXPERIMENTS)
