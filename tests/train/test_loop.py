"""The training loop in a single process: learning, exact resumption and error handling."""

import errno
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from calm.config import load_config
from calm.errors import UserError
from calm.files import sha256_of
from calm.train import checkpoint as checkpoint_module
from calm.train import loop
from calm.train.checkpoint import damage
from calm.train.loop import train
from calm.train.stages import AutoencoderStage
from calm.train.tracking import METRICS
from tests.train.conftest import command, metrics, run


def weights(output):
    return load_file(output / "model" / "model.safetensors")


def assert_same_weights(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def settings(recipe, *more):
    return load_config(str(recipe), list(more))


def resume(recipe, output, *more, warn=lambda _: None) -> list[int]:
    """Resume a run. Returns the steps that it performed."""
    steps = []
    train(settings(recipe, *more), output, resume=True, report=lambda r: steps.append(r.step), warn=warn)
    return steps


def test_loss_decreases_and_outputs_are_complete(recipe, tmp_path):
    summary = train(settings(recipe, "train.steps=60", "train.tensorboard=true"), tmp_path / "run")
    losses = metrics(tmp_path / "run")
    assert sorted(losses) == list(range(1, 61))
    assert np.mean([losses[s] for s in range(51, 61)]) < 0.8 * losses[1]
    assert summary["steps"] == 60
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "run.json", "loss.png", "model", "checkpoints", "tensorboard"} <= files
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["versions"]["torch"] == torch.__version__
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) <= 3  # the most recent two and the best
    from transformers import AutoModel, AutoTokenizer

    import calm  # noqa: F401

    model = AutoModel.from_pretrained(tmp_path / "run" / "model")
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "run" / "model"))


def test_gradient_accumulation_does_not_change_the_loss(recipe, tmp_path):
    train(settings(recipe), tmp_path / "whole")
    train(settings(recipe, "train.accumulation=4"), tmp_path / "parts")
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert max(abs(whole[s] - parts[s]) for s in whole) < 1e-4  # the summation order differs


def test_resuming_after_sigkill_gives_identical_weights(recipe, tmp_path):
    train(settings(recipe), tmp_path / "whole")
    output = tmp_path / "killed"
    code = (
        "import os, calm.train.loop as loop; original = loop._Run._step\n"
        "def die(run, step, parts):\n"
        "    if step == int(os.environ['STEP']): os.kill(os.getpid(), 9)\n"
        "    return original(run, step, parts)\n"
        "loop._Run._step = die\n"
        "from calm.cli import main; main()"
    )
    full = command(recipe, output, "--resume")
    for step in sorted(np.random.default_rng(0).integers(1, 30, 3).tolist()):
        killed = [full[0], "-c", code, *full[3:]]
        done = subprocess.run(killed, capture_output=True, env={**os.environ, "STEP": str(step)}, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
    saved = [int(p.name.removeprefix("step-")) for p in (output / "checkpoints").glob("step-????????")]
    assert resume(recipe, output) == list(range(max(saved, default=0) + 1, 31))
    assert_same_weights(tmp_path / "whole", output)
    assert metrics(tmp_path / "whole") == metrics(output)


def test_killed_while_saving(recipe, tmp_path):
    """A run that is killed before the rename leaves a directory that is not mistaken for a checkpoint."""
    train(settings(recipe), tmp_path / "whole")
    code = (
        "import os, calm.train.checkpoint as c; original = c.write_json\n"
        "def die(path, value):\n"
        "    if value['step'] == 20: os.kill(os.getpid(), 9)\n"
        "    original(path, value)\n"
        "c.write_json = die\n"
        "from calm.cli import main; main()"
    )
    output = tmp_path / "killed"
    full = command(recipe, output)
    done = subprocess.run([full[0], "-c", code, *full[3:]], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert (output / "checkpoints" / "step-00000020.writing").exists()
    assert resume(recipe, output)[0] == 11
    assert not list((output / "checkpoints").glob("*.writing"))
    assert_same_weights(tmp_path / "whole", output)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_a_checkpoint_and_exit(recipe, tmp_path, signum):
    output = tmp_path / "run"
    long = ["--set", "train.steps=100000", "--set", "train.checkpoint_every=100000"]
    process = subprocess.Popen(
        command(recipe, output, *long), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (output / "metrics.jsonl").exists() or (output / "metrics.jsonl").stat().st_size < 2000:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "stopped: saved at step" in stderr
    assert "Traceback" not in stderr
    (saved,) = (output / "checkpoints").iterdir()
    assert damage(saved) is None
    assert f"saved at step {int(saved.name.removeprefix('step-'))};" in stderr


@pytest.mark.parametrize("broken", ["shard", "record"])
def test_damaged_checkpoint_falls_back_to_the_previous_one(recipe, tmp_path, broken):
    output = tmp_path / "run"
    train(settings(recipe), output)
    shutil.copytree(output, tmp_path / "before")
    newest = output / "checkpoints" / "step-00000030"
    if broken == "shard":
        (path,) = newest.glob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    else:
        (newest / "checkpoint.json").write_text("{")
    warnings = []
    assert resume(recipe, output, warn=warnings.append)[0] == 21
    assert any("step-00000030 is damaged (" in message for message in warnings)
    assert damage(newest) is None  # saved again
    assert_same_weights(tmp_path / "before", output)


def test_large_checkpoints_are_split_into_files(recipe, tmp_path, monkeypatch):
    """Resuming from several files gives the same weights as from a single one."""
    train(settings(recipe), tmp_path / "one")
    limit = 10_000
    monkeypatch.setattr(checkpoint_module, "LARGEST_FILE", limit)
    output = tmp_path / "many"
    train(settings(recipe), output)
    files = sorted((output / "checkpoints" / "step-00000020").glob("*.safetensors"))
    assert len(files) > 3
    contents = [load_file(path) for path in files]
    for content in contents:
        assert len(content) == 1 or sum(4 * value.numel() for value in content.values()) <= limit
    (single,) = (tmp_path / "one" / "checkpoints" / "step-00000020").glob("*.safetensors")
    assert sum(len(content) for content in contents) == len(load_file(single))
    shutil.rmtree(output / "checkpoints" / "step-00000030")
    shutil.rmtree(output / "model")
    assert resume(recipe, output)[0] == 21
    assert_same_weights(tmp_path / "one", output)


def test_resuming_a_finished_run_performs_no_steps(recipe, tmp_path):
    train(settings(recipe), tmp_path / "run")
    before = sha256_of(tmp_path / "run" / "model" / "model.safetensors")
    assert resume(recipe, tmp_path / "run") == []
    assert sha256_of(tmp_path / "run" / "model" / "model.safetensors") == before
    assert sorted(metrics(tmp_path / "run")) == list(range(1, 31))


def test_the_best_checkpoint_is_kept(recipe, tmp_path, monkeypatch):
    scores = iter([0.1, 0.9, 0.2, 0.3, 0.4, 0.5])
    monkeypatch.setattr(AutoencoderStage, "evaluate", lambda self: {"score": next(scores)})
    train(settings(recipe, "train.checkpoint_every=5", "train.keep_checkpoints=1"), tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000010", "step-00000030"]


def test_training_continues_if_metrics_cannot_be_written(recipe, tmp_path, monkeypatch):
    original = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *a, **k: original(Path("/dev/full") if path.name == METRICS else path, *a, **k)
    )
    monkeypatch.setattr(loop, "plot_losses", lambda _: None)
    warnings = []
    assert train(settings(recipe), tmp_path / "run", warn=warnings.append)["steps"] == 30
    assert warnings == ["metrics cannot be written (No space left on device); training continues"]


def test_training_without_git(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    train(settings(recipe, "train.steps=2"), tmp_path / "run")
    assert "commit" not in json.loads((tmp_path / "run" / "model" / "run.json").read_text())["versions"]


def test_full_disk_keeps_the_previous_checkpoint(recipe, tmp_path, monkeypatch):
    original = checkpoint_module._save

    def full(state, path, world):
        if "step-00000020" in path.name:
            path.mkdir()
            (path / "half").write_text("x")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(state, path, world)

    monkeypatch.setattr(checkpoint_module, "_save", full)
    warnings = []
    train(settings(recipe), tmp_path / "run", warn=warnings.append)
    assert any("step 20: [Errno 28] No space left on device); earlier ones are kept" in message for message in warnings)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000010",
        "step-00000030",
    ]


def test_steps_with_nonfinite_loss_are_skipped_and_counted(recipe, tmp_path, monkeypatch):
    original = loop._Run._step

    def step(self, number, parts):
        if number in (3, 4):
            for part in parts:
                part["num_chunks"] = float("nan")
        return original(self, number, parts)

    monkeypatch.setattr(loop._Run, "_step", step)
    warnings = []
    summary = train(settings(recipe), tmp_path / "run", warn=warnings.append)
    assert summary["skipped_steps"] == 2
    assert train(settings(recipe), tmp_path / "run", resume=True)["skipped_steps"] == 2  # restored on resume
    assert warnings[0].startswith(
        "1 of the last 1 steps skipped, up to step 4: the loss or the gradient was not finite"
    )
    assert "the loss is nan" in warnings[0]
    assert len(warnings) == 2
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "run").values())


def test_ten_consecutive_skipped_steps_stop_the_run(recipe, tmp_path):
    with pytest.raises(UserError, match="10 steps in a row, up to step .*learning_rate"):
        train(settings(recipe, "optimizer.learning_rate=1e30", "optimizer.warmup_steps=0"), tmp_path / "run")


def test_bf16_training(recipe, tmp_path):
    train(settings(recipe, "train.precision=bf16", "train.steps=12"), tmp_path / "bf16")
    assert metrics(tmp_path / "bf16")[12] < metrics(tmp_path / "bf16")[1]


def test_compile_without_a_compiler_warns_and_trains(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    warnings = []
    train(settings(recipe, "train.compile=true", "train.steps=3"), tmp_path / "run", warn=warnings.append)
    assert warnings == ["no C++ compiler found; continuing without train.compile"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "train.steps=0"], "train.steps: input should be greater than or equal to 1, not 0"),
        (["--set", "optimizer.learning_rate=-1"], "optimizer.learning_rate: input should be greater than 0, not -1"),
        (["--set", "data.sets.0.path=nowhere"], "nowhere is not a prepared dataset (no such directory)"),
        (["--set", "train.gradient_checkpointing=true"], "has no backbone to checkpoint"),
        (["--set", "stage=decoder"], "stage: input should be 'autoencoder'"),
    ],
)
def test_invalid_recipes(recipe, tmp_path, more, message):
    done = run(recipe, tmp_path / "run", *more)
    assert done.returncode == 2
    assert not (tmp_path / "run" / "config.yaml").exists()  # the directory can be used again
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_directories_with_other_content_are_refused(recipe, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("work")
    with pytest.raises(UserError, match=r"did not make \(thesis.tex\)"):
        train(settings(recipe), tmp_path / "foreign")
    train(settings(recipe, "train.steps=2"), tmp_path / "run")
    with pytest.raises(UserError, match="holds a run; continue it with --resume"):
        train(settings(recipe, "train.steps=2"), tmp_path / "run")
    with pytest.raises(UserError, match="it differs in seed, optimizer"):
        train(settings(recipe, "seed=3", "optimizer.eps=1e-4"), tmp_path / "run", resume=True)


def test_runs_of_older_versions_are_refused(recipe, tmp_path):
    train(settings(recipe, "train.steps=2"), tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").glob("*/checkpoint.json")
    record = json.loads(path.read_text())
    record["versions"]["calm"] = "0.1.0.dev0"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"was written by calm 0\.1\.0\.dev0, and calm .* cannot resume it"):
        train(settings(recipe, "train.steps=4"), tmp_path / "run", resume=True)


def test_fewer_steps_than_done_are_refused(recipe, tmp_path):
    train(settings(recipe, "train.steps=4"), tmp_path / "run")
    before = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(UserError, match="has done 4 steps, but train.steps is 3; set it to at least 4"):
        train(settings(recipe, "train.steps=3"), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_damaged_metrics_and_linked_model_directories(recipe, tmp_path):
    """Damaged lines are left out; links are replaced, and what they link to is kept."""
    output = tmp_path / "run"
    train(settings(recipe, "train.steps=3"), output)
    lines = (output / "metrics.jsonl").read_bytes().splitlines()
    (output / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"\xff\xfe", b"[1]", b"{}", *lines[1:], lines[0][:9]]))
    for name in ("model", "model.writing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("of others")
    shutil.rmtree(output / "model")
    (output / "model").symlink_to(tmp_path / "model")
    (output / "model.writing").symlink_to(tmp_path / "model.writing")
    train(settings(recipe, "train.steps=4"), output, resume=True)
    assert sorted(metrics(output)) == [1, 2, 3, 4]
    assert (output / "model" / "model.safetensors").exists()
    assert not (output / "model").is_symlink()
    for name in ("model", "model.writing"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["weights"]


def test_datasets_with_different_tokenizers(recipe, jsonl, tmp_path):
    from calm.data.prepare import prepare
    from calm.data.workers import PrepareOptions

    prepare([str(jsonl)], tmp_path / "other", PrepareOptions("bpe:300", validation_share=0.2), workers=1)
    config = load_config(str(recipe))
    sets = [*config.data.sets, config.data.sets[0].model_copy(update={"path": tmp_path / "other"})]
    config = config.model_copy(update={"data": config.data.model_copy(update={"sets": sets})})
    with pytest.raises(UserError, match="were prepared with different tokenizers"):
        train(config, tmp_path / "run")


def test_too_little_memory_gives_a_warning(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_free_memory", lambda _: 1000.0)
    warnings = []
    train(settings(recipe, "train.steps=2"), tmp_path / "run", warn=warnings.append)
    assert "GB are free; a larger train.accumulation" in warnings[0]
