"""Claims of the documentation about whole recipes, several minutes each. Run with `make slow`."""

import gzip
import json

import pytest

from calm.data.shards import PreparedData

pytestmark = pytest.mark.slow

EMBEDDED = ["--tokenizer", "bpe:4096", "--validation-share", 0.05, "--test-share", 0.05, "--output", "data/embedded"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slow")


@pytest.fixture
def run(calm, folder):
    def succeed(*arguments) -> dict:
        done = calm(*arguments, "--json", cwd=folder, timeout=3600)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return succeed


def test_laptop_autoencoder_reconstructs_999_of_1000_tokens_from_posterior_samples(run):
    run("prepare", "embedded", *EMBEDDED, "--resume")
    run("train", "laptop-autoencoder", "--output", "runs/laptop")
    found = run("evaluate", "runs/laptop/model", "--data", "data/embedded")
    assert found["token_accuracy"] >= 0.999
    assert found["mean_sigma"] >= 0.15
    assert found["collapsed_dimensions"] == 0


def test_dimensions_collapse_without_the_kl_floor(run):
    """As in Table 2: without dropout and without a floor of the KL, dimensions collapse; the floor prevents it."""
    run("prepare", "embedded", *EMBEDDED, "--resume")
    collapsed = {}
    for floor in (0.0, 0.5):
        settings = ["latent_size=128", "token_dropout=0", "latent_dropout=0", f"kl_floor={floor}"]
        overrides = [part for setting in settings for part in ("--set", f"autoencoder.{setting}")]
        output = f"runs/floor-{floor}"
        run("train", "laptop-autoencoder", "--output", output, "--set", "train.steps=1000", *overrides)
        found = run("evaluate", f"{output}/model", "--data", "data/embedded")
        collapsed[floor] = found["collapsed_dimensions"]
    assert collapsed[0.0] > 10
    assert collapsed[0.5] == 0


def test_compiled_training_has_the_same_loss(run, folder):
    run("prepare", "embedded", *EMBEDDED, "--resume")
    losses = {}
    for compiled in (False, True):
        output = f"runs/compile-{compiled}"
        settings = ["--set", "train.steps=20", "--set", "train.log_every=20", "--set", f"train.compile={compiled}"]
        run("train", "toy-autoencoder", "--output", output, *settings)
        lines = (folder / output / "metrics.jsonl").read_text().splitlines()
        losses[compiled] = next(json.loads(line)["loss"] for line in lines)
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)


def test_wikipedia_round_trips(run, shared, folder):
    source = shared / "data" / "enwik8.valid.jsonl.gz"
    run("prepare", source, "--tokenizer", "bpe:8192", "--validation-share", 0, "--output", "data/valid")
    data = PreparedData(folder / "data" / "valid")
    stream = data.split("train")
    with gzip.open(source, "rt") as file:
        for number, line in enumerate(file):
            first, last = stream.document_range(number)
            assert data.tokenizer.decode(stream[first:last].tolist()) == json.loads(line)["text"]
    assert number + 1 == len(stream.document_lengths)


def test_all_experiments_at_toy_scale(calm, folder):
    """All experiments, and a second run with nothing left to do."""
    for timeout in (1800, 60):
        done = calm("reproduce", "all", "--scale", "toy", "--json", cwd=folder, timeout=timeout)
        assert done.returncode == 0, done.stderr[-2000:]
        assert len(json.loads(done.stdout)) == 15
    made = folder / "reproduction" / "toy"
    assert len(list(made.glob("*.png"))) == len(list(made.glob("*.md"))) == 15
    assert "step 1/" not in done.stderr
