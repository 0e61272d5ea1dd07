"""Run keys: identical runs are shared between experiments, different runs are not."""

from pathlib import Path

import pytest

from calm.config import load_config
from calm.errors import UserError
from calm.paper.experiments import EXPERIMENTS
from calm.paper.results import Results
from calm.paper.scales import CHUNK_SIZES, EMBEDDED_DIGEST, SCALES, Run, scale_of

RUN = Run("characters-calm", (), Run("characters-autoencoder"))
EVERY = [(scale, experiment) for scale in SCALES.values() for experiment in EXPERIMENTS.values()]


def no_results(measure):
    return None


def test_key_depends_on_what_changes_the_weights():
    key = RUN.key("text")
    same = ({"train.log_every": 3}, {"train.checkpoint_every": 7}, {"train.tensorboard": True}, {"seed": 0})
    for changes in (*same, {"language_model.alpha": 1.0}, {"language_model.alpha": 2, "language_model.alpha": 1}):  # noqa: F601
        assert RUN.with_settings(changes).key("text") == key, changes
    others = [
        RUN.with_settings({"seed": 1}),
        RUN.with_settings({"language_model.alpha": 1.5}),
        RUN.with_settings({"train.steps": 3}),
        Run(RUN.recipe, (), Run("characters-autoencoder").with_settings({"autoencoder.kl_weight": 0.1})),
        Run("characters-transformer"),
    ]
    keys = {key, RUN.key("another text"), *(other.key("text") for other in others)}
    assert len(keys) == len(others) + 2


def test_overrides_give_the_config_of_the_run(tmp_path):
    run = RUN.with_settings({"language_model.alpha": 1.5, "language_model.backbone.num_hidden_layers": 2})
    config = load_config(run.recipe, run.overrides(tmp_path / "some data", tmp_path / "model"))
    assert config == run.config(tmp_path / "some data", tmp_path / "model")
    assert config.language_model.alpha == 1.5
    assert config.data.sets[0].path == tmp_path / "some data"


def test_partial_runs_are_extendable():
    whole = RUN.until(1.0)
    assert whole.steps == RUN.steps
    assert whole.is_extendable
    assert not RUN.is_extendable  # the learning rate schedule depends on the number of steps
    assert RUN.until(0.1).steps == round(0.1 * RUN.steps)
    assert RUN.until(1e-9).steps == 1


@pytest.mark.parametrize(("scale", "experiment"), EVERY, ids=lambda thing: thing.name)
def test_every_experiment_has_valid_runs(scale, experiment):
    rows = experiment.rows(scale, no_results)
    assert len({row.label for row in rows}) == len(rows) > 1
    columns = {"parameters", "train_flops", "inference_flops", "relative_cost"} | set(experiment.columns)
    for row in rows:
        assert set(row.paper) <= columns, row.label
        for measure in row.measures:
            config = measure.run.base_config  # raises on invalid fields or values
            autoencoder = measure.run.autoencoder
            assert (autoencoder is not None) == (config.stage == "language-model")
            if autoencoder is not None:
                assert autoencoder.base_config.data.chunk_size == config.data.chunk_size
                assert autoencoder.base_config.autoencoder.latent_size == config.autoencoder.latent_size


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_experiments_share_the_base_run(scale):
    """The row with the default settings is the same run in every ablation, and is trained once."""
    shared = {"alpha": "α = 1", "model-input": "discrete", "autoencoder-ablation": "KL clipped, both"}
    shared |= {"kl-weight": "β = 0.001", "autoencoder-scale": "baseline"}
    keys = set()
    for name, label in shared.items():
        (row,) = [row for row in EXPERIMENTS[name].rows(scale, no_results) if row.label == label]
        keys.add(row.measures[0].key("text"))
    assert len(keys) == 1


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("name", SCALES)
def test_chunk_sizes_of_one_experiment_have_equal_tokens_per_step(name, chunk_size):
    scale = scale_of(name)
    other, default = (scale.calm(autoencoder=scale.autoencoder(chunk_size=k)).base_config.data for k in (chunk_size, 4))
    assert other.chunk_size == chunk_size
    assert other.batch_size * other.sequence_length == default.batch_size * default.sequence_length
    assert other.sequence_length // chunk_size == default.sequence_length // 4


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("name", SCALES)
def test_scales_of_other_chunk_sizes_have_equal_chunks_per_step(name, chunk_size):
    """The cost of a step depends on its number of chunks."""
    other, default = (scale_of(name, k).calm().base_config.data for k in (chunk_size, 4))
    assert other.batch_size == default.batch_size
    assert other.sequence_length // chunk_size == default.sequence_length // 4


def test_paper_scale_uses_the_paper_recipes():
    """The scale does not change model sizes, steps or samples of the recipes."""
    scale = SCALES["paper"]
    for size in ("M", "L", "XL"):
        recipe = f"paper-calm-{size.lower()}"
        ours = scale.calm(size=size).config(Path("data/pile"), Path("runs/paper-autoencoder-k4/model"))
        assert ours == load_config(recipe)
    assert scale.calm().base_config.train.steps == 50_000


@pytest.mark.parametrize(
    ("directory", "scale", "chunk_size"), [("laptop", "laptop", 4), ("laptop-k2", "laptop, K = 2", 2)]
)
def test_stored_results_keep_their_keys(directory, scale, chunk_size):
    """Results in the repository would have to be measured again if the keys of runs changed."""
    stored = Path(__file__).resolve().parents[2] / "reproduction" / directory
    if not stored.exists():
        pytest.skip("no stored results")
    results = Results(stored, scale, EMBEDDED_DIGEST)
    assert results.experiments
    for name in results.experiments:
        for row in EXPERIMENTS[name].rows(scale_of("laptop", chunk_size), results.find):
            assert all(results.find(measure) is not None for measure in row.measures), (name, row.label)


def test_unknown_scale_and_chunk_size():
    with pytest.raises(UserError, match="did you mean laptop"):
        scale_of("labtop")
    with pytest.raises(UserError, match="one of 1, 2, 4, 8, not 3"):
        scale_of("toy", 3)
