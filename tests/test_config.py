"""Recipes: precedence of values, round trips, fields of heads, and error messages."""

import itertools
import re

import pytest
import yaml

from calm.config import changed_values, load_config, recipe_names, recipe_summary, save_config, to_yaml
from calm.errors import ConfigError
from calm.heads import HEADS


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_parses_and_has_a_summary(name):
    assert load_config(name)
    assert re.fullmatch(r"[A-Z].{20,110}\.", recipe_summary(name))


def test_overrides_take_precedence_over_recipe_and_defaults(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("data:\n  sets: [{path: a}, {path: b, weight: 3}]\n  chunk_size: 2\ntrain: {steps: 5}\n")
    config = load_config(str(path), ["data.batch_size=7", "data.sets.1.weight=1e-1", "seed=3"])
    assert config.data.sequence_length == 512
    assert config.data.chunk_size == 2
    assert config.data.batch_size == 7
    assert config.data.sets[1].weight == 0.1
    assert config.seed == 3


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_round_trips(name, tmp_path):
    save_config(load_config(name), tmp_path)
    assert load_config(str(tmp_path / "config.yaml")) == load_config(name)


def test_saved_config_is_a_recipe(tmp_path):
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
        (["data.front_padding=.nan"], "data.front_padding"),
        (["data=null"], "data"),
    ],
)
def test_error_messages(settings, message):
    with pytest.raises(ConfigError) as error:
        load_config("toy-autoencoder", settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "data: [unclosed", "\x00\x01"])
def test_files_that_are_not_recipes(tmp_path, content):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match="bad.yaml"):
        load_config(str(path))


CHAIN = ["language_model.head=chain"]
FLOW = ["language_model.head=flow"]


@pytest.mark.parametrize("head", HEADS)
def test_defaults_of_the_head_are_in_the_resolved_config(head, tmp_path):
    """And only of this head, after a round trip as well."""
    config = load_config("toy-calm", [f"language_model.head={head}"])
    defaults = HEADS[head].Config().model_dump()
    assert defaults
    assert config.language_model.head_settings == defaults
    resolved = yaml.safe_load(to_yaml(config))["language_model"]
    assert {name: resolved[name] for name in defaults} == defaults
    others = {name for other in HEADS.values() for name in other.Config.model_fields} - set(defaults)
    assert not others & set(resolved)
    save_config(config, tmp_path)
    assert load_config(str(tmp_path / "config.yaml")) == config


def test_fields_of_the_head_are_validated_and_converted():
    model = load_config("toy-calm", ["language_model.alpha=1", "language_model.num_target_samples=100"]).language_model
    assert model.head_settings == {
        **HEADS["energy"].Config().model_dump(),
        "alpha": 1.0,
        "num_target_samples": 100,
    }
    assert isinstance(model.alpha, float)
    with pytest.raises(ValueError, match="frozen"):
        model.alpha = 1.5


def test_fields_of_other_heads_are_dropped():
    """A recipe may be run with another head; values of the first head's fields then do not matter."""
    config = load_config("toy-calm", [*FLOW, "language_model.alpha=1.5", "language_model.noise_size=-3"])
    assert config == load_config("toy-calm", FLOW)
    assert not hasattr(config.language_model, "alpha")
    assert load_config("toy-calm", [*FLOW, "language_model.num_model_samples=3"]).language_model.head_settings == {
        **HEADS["flow"].Config().model_dump(),  # a field that several heads have is kept
        "num_model_samples": 3,
    }


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (
            ["head=enrgy"],
            ["head must be one of energy, flow, mean-flow, diffusion, chain, probit, not 'enrgy'", "mean energy?"],
        ),
        (["head=gan"], ["head must be one of energy, flow, mean-flow, diffusion, chain, probit, not 'gan'"]),
        (["head=[energy]"], ["head must be one of energy", "not ['energy']"]),
        (["head=null"], ["head must be one of energy", "not None"]),
        (["hed=flow"], ["unknown key hed; did you mean head?"]),
        (["alhpa=1.5"], ["unknown key alhpa; did you mean alpha?"]),
        (["head=chain", "untied_lm_heads=true"], ["unknown key untied_lm_heads; did you mean untied_lm_head?"]),
        (["own_words=true"], ["unknown key own_words"]),
        (["alpha=2.5"], ["not a proper scoring rule for alpha = 2.5"]),
        (["alpha=high"], ["alpha: ", "valid number"]),
        (["num_model_samples=1"], ["at least 2, not 1"]),
        (["noise_size=0"], ["noise_size: ", "greater than or equal to 1"]),
        (["head=flow", "sampler=heun"], ["sampler: ", "'euler' or 'midpoint'"]),
        (["head=flow", "num_sampling_steps=0"], ["num_sampling_steps: ", "greater than or equal to 1"]),
        (["head=chain", "untied_lm_head=7"], ["untied_lm_head: ", "valid boolean"]),
        (["start=model"], ["so autoencoder, backbone, num_head_layers cannot be set"]),
    ],
)
def test_error_messages_for_fields_of_heads(settings, messages):
    with pytest.raises(ConfigError) as error:
        load_config("toy-calm", [f"language_model.{setting}" for setting in settings])
    for message in ["language_model", *messages]:
        assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "named"), [(FLOW, "head"), (["language_model.alpha=1.5"], "alpha"), ([*CHAIN], "head")]
)
def test_start_names_only_the_fields_that_were_set(settings, named):
    alone = ["start=x", "autoencoder=null", "backbone={}", "num_head_layers=null"]
    alone = [f"language_model.{setting}" for setting in alone]
    assert load_config("toy-calm", [*alone, "language_model.vocabulary_sample=5"])
    with pytest.raises(ConfigError, match=f"so {named} cannot be set"):
        load_config("toy-calm", [*alone, *settings])


def test_changed_values():
    default = changed_values(load_config("toy-calm"))
    assert set(default) == {"stage", "data", "autoencoder", "language_model", "optimizer", "train"}
    assert set(default["language_model"]) == {"autoencoder", "backbone", "num_head_layers"}
    same = ["language_model.head=energy", "language_model.alpha=1", "language_model.untied_lm_head=true", "seed=0"]
    assert changed_values(load_config("toy-calm", same)) == default
    changed = changed_values(load_config("toy-calm", ["language_model.alpha=1.5", "seed=3"]))
    assert changed == {**default, "seed": 3, "language_model": {**default["language_model"], "alpha": 1.5}}
    chain = changed_values(load_config("toy-calm", [*CHAIN, "language_model.untied_lm_head=true"]))
    assert chain["language_model"] == {**default["language_model"], "head": "chain", "untied_lm_head": True}
    flow = changed_values(load_config("toy-calm", FLOW))
    assert flow["language_model"] == {**default["language_model"], "head": "flow"}
    assert "language_model" not in changed_values(load_config("toy-autoencoder"))


LAUGHS = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} {{backbone: {{<<: [{', '.join(['*' + before] * 10)}]}}}}\n"
    for before, name in itertools.pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LAUGHS, r"line 2: not YAML \(found the alias \*a, and recipes have none; write the value itself\)"),
        ("train: &t\n  steps: *t\n", r"line 2: not YAML \(found the alias \*t"),
        ("[" * 5_000, r"not YAML \(maximum recursion depth exceeded"),
        ("seed: !!int ''", r"not YAML \(string index out of range\)"),
        ("seed: 2026-13-45", r"not YAML \(month must be in 1..12\)"),
        (f"seed: {'1' * 5_000}", r"not YAML \(Exceeds the limit"),
    ],
    ids=["billion laughs", "recursive", "deep", "tag", "date", "large"],
)
def test_hostile_recipes(tmp_path, content, message):
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_config(str(tmp_path / "a.yaml"))
    with pytest.raises(ConfigError, match="the value is not YAML"):
        load_config("toy-autoencoder", [f"seed={content.partition(': ')[2] or content}"])
