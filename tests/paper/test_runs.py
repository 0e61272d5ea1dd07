"""Runs are known by what they compute: shared where they are the same, told apart where they are not."""

from pathlib import Path

import pytest

from calm.config import load_config
from calm.errors import UserError
from calm.paper.experiments import EXPERIMENTS
from calm.paper.runs import Run
from calm.paper.scales import CHUNK_SIZES, SCALES, scale_of

RUN = Run("characters-calm", (), Run("characters-autoencoder"))
EVERY = [(scale, experiment) for scale in SCALES.values() for experiment in EXPERIMENTS.values()]


def unknown(measure):
    return None


def test_a_key_is_of_what_changes_the_weights():
    key = RUN.key("text")
    same = ({"train.log_every": 3}, {"train.checkpoint_every": 7}, {"train.tensorboard": True}, {"seed": 0})
    for changes in (*same, {"language_model.alpha": 1.0}, {"language_model.alpha": 2, "language_model.alpha": 1}):  # noqa: F601
        assert RUN.but(changes).key("text") == key, changes
    others = [
        RUN.but({"seed": 1}),
        RUN.but({"language_model.alpha": 1.5}),
        RUN.but({"train.steps": 3}),
        Run(RUN.recipe, (), Run("characters-autoencoder").but({"autoencoder.kl_weight": 0.1})),
        Run("characters-transformer"),
    ]
    keys = {key, RUN.key("another text"), *(other.key("text") for other in others)}
    assert len(keys) == len(others) + 2


def test_a_command_trains_the_run(tmp_path):
    run = RUN.but({"language_model.alpha": 1.5, "language_model.backbone.num_hidden_layers": 2})
    config = load_config(run.recipe, run.overrides(tmp_path / "some data", tmp_path / "model"))
    assert config == run.config(tmp_path / "some data", tmp_path / "model")
    assert config.language_model.alpha == 1.5
    assert config.data.sets[0].path == tmp_path / "some data"


def test_moments_are_of_a_run_that_can_go_on():
    whole = RUN.until(1.0)
    assert whole.steps == RUN.steps
    assert whole.can_go_on
    assert not RUN.can_go_on  # its learning rate falls towards its own end
    assert RUN.until(0.1).steps == round(0.1 * RUN.steps)
    assert RUN.until(1e-9).steps == 1


@pytest.mark.parametrize(("scale", "experiment"), EVERY, ids=lambda thing: thing.name)
def test_every_experiment_is_made_of_valid_runs(scale, experiment):
    rows = experiment.rows(scale, unknown)
    assert len({row.label for row in rows}) == len(rows) > 1
    shown = {"parameters", "train_flops", "inference_flops", "relative_cost"} | set(experiment.columns)
    for row in rows:
        assert set(row.paper) <= shown, row.label
        for measure in row.measures:
            config = measure.run.plain  # a wrong field or value would be told here
            below = measure.run.autoencoder
            assert (below is not None) == (config.stage == "language-model")
            if below is not None:
                assert below.plain.data.chunk_size == config.data.chunk_size
                assert below.plain.autoencoder.latent_size == config.autoencoder.latent_size


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_experiments_share_the_base_run(scale):
    """The row that an ablation leaves as it is stands in all of them, and is trained once."""
    shared = {"alpha": "α = 1", "model-input": "discrete", "autoencoder-ablation": "KL clipped, both"}
    shared |= {"kl-weight": "β = 0.001", "autoencoder-scale": "usual"}
    keys = set()
    for name, label in shared.items():
        (row,) = [row for row in EXPERIMENTS[name].rows(scale, unknown) if row.label == label]
        keys.add(row.measures[0].key("text"))
    assert len(keys) == 1


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("name", SCALES)
def test_chunk_sizes_of_one_experiment_see_as_many_tokens(name, chunk_size):
    scale = scale_of(name)
    other, usual = (scale.calm(autoencoder=scale.autoencoder(chunk_size=k)).plain.data for k in (chunk_size, 4))
    assert other.chunk_size == chunk_size
    assert other.batch_size * other.sequence_length == usual.batch_size * usual.sequence_length
    assert other.sequence_length // chunk_size == usual.sequence_length // 4


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("name", SCALES)
def test_runs_of_another_chunk_size_take_as_long(name, chunk_size):
    """As many chunks a step, which is what a step costs."""
    other, usual = (scale_of(name, k).calm().plain.data for k in (chunk_size, 4))
    assert other.batch_size == usual.batch_size
    assert other.sequence_length // chunk_size == usual.sequence_length // 4


def test_the_papers_scale_is_the_papers_recipes():
    """No experiment changes the sizes, steps and samples of the recipes it is named after."""
    scale = SCALES["paper"]
    for size in ("M", "L", "XL"):
        recipe = f"paper-calm-{size.lower()}"
        ours = scale.calm(size=size).config(Path("data/pile"), Path("runs/paper-autoencoder-k4/model"))
        assert ours == load_config(recipe)
    assert scale.calm().plain.train.steps == 50_000


def test_bad_names():
    with pytest.raises(UserError, match="did you mean laptop"):
        scale_of("labtop")
    with pytest.raises(UserError, match="one of 1, 2, 4, 8, not 3"):
        scale_of("toy", 3)
