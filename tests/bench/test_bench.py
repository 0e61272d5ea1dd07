"""The instruments of `calm bench`, not what they measure: times are for benchmarks."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from calm import products as calm_products
from calm.bench import generation, scaling, training
from calm.bench.clock import ratios, row, take_turns
from calm.bench.machine import Machine
from calm.bench.matmuls import Products
from calm.bench.models import RECIPES, SIZES, Training, config_of, model_of

TINY = (
    *("data.batch_size=2", "data.sequence_length=16", "language_model.backbone.hidden_size=16"),
    *("language_model.backbone.intermediate_size=32", "language_model.backbone.num_hidden_layers=1"),
    *("autoencoder.hidden_size=16", "autoencoder.intermediate_size=32", "autoencoder.latent_size=8"),
)


def test_ways_take_turns():
    seen = []
    times = take_turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 3)
    assert seen == ["a", "b"] * 4  # one round before warms up
    assert [len(values) for values in times.values()] == [3, 3]


def test_rows_have_medians_and_spread():
    assert row("x", [3.0, 1.0, 2.0], "ms") == ("x", 2.0, 1.0, 3.0, "ms")
    assert ratios([4.0, 9.0], [2.0, 3.0]) == [2.0, 3.0]


def test_products_are_those_of_the_computation():
    left, right, bias = torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)
    batch = torch.randn(2, 4, 6)

    def compute() -> None:
        torch.addmm(bias, left, right).relu() @ torch.randn(3, 11)
        torch.bmm(batch, batch.mT)

    products = Products(compute)
    assert [call.__name__.split(".")[0] for call, _ in products.calls] == ["addmm", "mm", "bmm"]
    assert products.flops == 2 * 5 * 7 * 3 + 2 * 5 * 3 * 11 + 2 * 2 * 4 * 6 * 4
    products.run()


@pytest.mark.parametrize("recipe", ["laptop-calm", "quickstart-calm", "laptop-transformer", "laptop-autoencoder"])
@pytest.mark.parametrize("wide", [True, False])
def test_products_of_a_step_are_what_torch_counts(monkeypatch, recipe, wide):
    monkeypatch.setattr(calm_products, "WIDE", wide)
    made = Training(config_of(recipe, "laptop", *TINY), 64)
    made.step()
    products = Products(made.forward_backward)
    with FlopCounterMode(display=False) as counter:
        made.forward_backward()
    counted = sum(flops for name, flops in counter.get_flop_counts()["Global"].items() if "scaled_dot" not in str(name))
    assert products.flops == counted
    for run in (products.run, products.run_own):  # either way it is the same work
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == counted


def test_a_step_learns():
    made = Training(config_of("quickstart-calm", "laptop", *TINY), 64)
    for group in made.optimizer.param_groups:
        group["lr"] = 1e-2
    before = made.model(**made.given).loss.item()
    for _ in range(20):
        made.step()
    assert made.model(**made.given).loss.item() < before


def test_training_is_measured(monkeypatch):
    monkeypatch.setattr(training, "config_of", lambda recipe, size: config_of(recipe, size, *TINY))
    rows = {found.name: found for found in training.measure("laptop", 1, Machine(1e12, 1e10))}
    for kind in RECIPES["laptop"]:
        assert rows[f"{kind}: a step"].median > 0
        assert rows[f"{kind}: share of a bare loop over its matrix products"].median > 0
    assert "energy: tokens/s, times LlamaForCausalLM's" in rows


def test_the_weights_of_a_step_are_all_that_it_reads():
    """The words of a vocabulary once for all tokens of a latent, by a chain for each."""
    for recipe, times in (("laptop-calm", 1), ("quickstart-calm", 4)):
        model = model_of(config_of(recipe, "laptop", *TINY), 64)
        parts = [model.backbone, model.head, model.chunk_embedding.compress]
        parts += [model.autoencoder.decoder] if times == 1 else []
        numbers = sum(p.numel() for part in parts for p in part.parameters() if p.ndim > 1) + times * 64 * 16
        assert sum(weight.numel() for weight in generation.weights_of_step(model)) == numbers


def test_generation_is_measured(monkeypatch):
    monkeypatch.setattr(generation, "config_of", lambda recipe, size: config_of(recipe, size, *TINY))
    rows = {found.name: found for found in generation.measure("laptop", 1, Machine(1e12, 1e10))}
    assert rows["energy, int8, T = 1: times LlamaForCausalLM.generate"].median > 0
    for kind in ("energy", "chain"):
        assert rows[f"{kind}, T = 1: a step"].median > rows[f"{kind}, T = 1: reading its weights once"].median > 0
        assert rows[f"{kind}, T = 1: share of that bound"].median < 1


def test_estimates_fall_with_gpus_and_never_below_what_is_moved():
    steps = [found for found in scaling.estimates("paper-calm-m") if "step" in found.name]
    assert [found.median for found in steps] == sorted((found.median for found in steps), reverse=True)
    assert all(found.low <= found.median for found in steps)


def test_the_command_says_what_is_wrong(calm):
    for arguments, message in (
        (["trainning"], "did you mean training?"),
        (["training", "--size", "big"], "laptop, paper"),
    ):
        done = calm("bench", *arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert message in done.stderr


@pytest.mark.slow
def test_the_command_prints_json(calm):
    done = calm("bench", "evaluation", "--rounds", "1", "--json")
    answer = json.loads(done.stdout)
    assert answer["machine"]["bytes_per_second"] > 0
    assert {"name", "median", "low", "high", "unit"} == set(answer["evaluation"][0])
    assert SIZES[0] == answer["size"]
