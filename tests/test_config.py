import pytest
import yaml

from calm.config import load_config, recipe_names, save_config, to_yaml
from calm.errors import ConfigError


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_parses(name):
    assert load_config(name)


def test_defaults_then_recipe_then_settings(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("data:\n  sets: [{path: a}, {path: b, weight: 3}]\n  chunk_size: 2\ntrain: {steps: 5}\n")
    config = load_config(str(path), ["data.batch_size=7", "data.sets.1.weight=1e-1", "seed=3"])
    assert config.data.sequence_length == 512
    assert config.data.chunk_size == 2
    assert config.data.batch_size == 7
    assert config.data.sets[1].weight == 0.1
    assert config.seed == 3


@pytest.mark.parametrize("name", recipe_names())
def test_every_saved_recipe_is_read_back(name, tmp_path):
    save_config(load_config(name), tmp_path)
    assert load_config(str(tmp_path / "config.yaml")) == load_config(name)


def test_a_saved_config_is_a_recipe(tmp_path):
    config = load_config("laptop-autoencoder", ["data.chunk_size=8"])
    save_config(config, tmp_path / "run")
    assert load_config(str(tmp_path / "run" / "config.yaml")) == config
    assert yaml.safe_load(to_yaml(config))["data"]["chunk_size"] == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.chunk_size=0"], "data.chunk_size: input should be greater than or equal to 1, not 0"),
        (["data.chunk_size=five"], "data.chunk_size: input should be a valid integer"),
        (["data.chunk_size=7"], "sequence_length must be a multiple of chunk_size"),
        (["dta.chunk_size=3"], "unknown key dta; did you mean data?"),
        (["data.sets.0.wait=3"], "unknown key data.sets.0.wait; did you mean weight?"),
        (["data.chunk_size"], "should read section.key=value"),
        (["data.chunk_size.deep=1"], "has no parts to set"),
        (["data.sets=[]"], "at least 1 item"),
        (["data.batch_size={"], "not YAML"),
        (["data.front_fill=.nan"], "data.front_fill"),
        (["data=null"], "data"),
    ],
)
def test_mistakes_are_explained(settings, message):
    with pytest.raises(ConfigError) as error:
        load_config("toy-autoencoder", settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "data: [unclosed", "\x00\x01"])
def test_files_that_are_no_recipe(tmp_path, content):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match="bad.yaml"):
        load_config(str(path))
