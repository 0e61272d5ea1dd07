"""Tests of the benchmark code; they do not check the measured times."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from calm.bench import generation, scaling, training
from calm.bench.clock import ratios, row, take_turns
from calm.bench.machine import Machine
from calm.bench.matmuls import ONEDNN, Products
from calm.bench.models import RECIPES, SIZES, Training, config_of, model_of
from calm.cpu import onednn

TINY = (
    *("data.batch_size=2", "data.sequence_length=16", "language_model.backbone.hidden_size=16"),
    *("language_model.backbone.intermediate_size=32", "language_model.backbone.num_hidden_layers=1"),
    *("autoencoder.hidden_size=16", "autoencoder.intermediate_size=32", "autoencoder.latent_size=8"),
)


def test_functions_run_in_turn():
    seen = []
    times = take_turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 3)
    assert seen == ["a", "b"] * 4  # including one warm-up round
    assert [len(values) for values in times.values()] == [3, 3]


def test_rows_have_median_minimum_and_maximum():
    assert row("x", [3.0, 1.0, 2.0], "ms") == ("x", 2.0, 1.0, 3.0, "ms")
    assert ratios([4.0, 9.0], [2.0, 3.0]) == [2.0, 3.0]


def test_recorded_matmuls():
    left, right, bias = torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)
    batch = torch.randn(2, 4, 6)

    def compute() -> None:
        torch.addmm(bias, left, right).relu() @ torch.randn(3, 11)
        torch.bmm(batch, batch.mT)

    products = Products(compute)
    assert [call.__name__.split(".")[0] for call, _ in products.calls] == ["addmm", "mm", "bmm"]
    assert products.flops == 2 * 5 * 7 * 3 + 2 * 5 * 3 * 11 + 2 * 2 * 4 * 6 * 4
    products.run()


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def uses_onednn(request, monkeypatch) -> bool:
    """Whether training uses oneDNN; it is forced on CPUs without AVX-512, too."""
    operator = onednn.product()
    if request.param and operator is None:
        if not torch.backends.mkldnn.is_available():
            pytest.skip("torch was built without oneDNN")
        operator = torch.ops.mkldnn._linear_pointwise
        if operator not in flop_registry:
            register_flop_formula(operator)(onednn._flops)
    monkeypatch.setattr(onednn, "product", lambda: operator if request.param else None)
    return request.param


@pytest.mark.parametrize(
    "recipe", ["laptop-calm", "laptop-chain", "laptop-probit", "laptop-transformer", "laptop-autoencoder"]
)
def test_flops_of_a_step_match_the_flop_counter(recipe, uses_onednn):
    step = Training(config_of(recipe, "laptop", *TINY), 64)
    step.step()
    products = Products(step.forward_backward)
    with FlopCounterMode(display=False) as counter:
        step.forward_backward()
    counted = sum(flops for name, flops in counter.get_flop_counts()["Global"].items() if "scaled_dot" not in str(name))
    assert products.flops == counted
    assert any(operator.name() == ONEDNN for operator, _ in products.calls) == uses_onednn
    for run in (products.run, products.run_own):  # same FLOPs with both kernels
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == counted


def test_training_step_reduces_the_loss():
    step = Training(config_of("laptop-chain", "laptop", *TINY), 64)
    for group in step.optimizer.param_groups:
        group["lr"] = 1e-2
    before = step.loss().item()
    for _ in range(20):
        step.step()
    assert step.loss().item() < before


def test_training_rows(monkeypatch):
    monkeypatch.setattr(training, "config_of", lambda recipe, size: config_of(recipe, size, *TINY))
    rows = {row.name: row for row in training.measure("laptop", 1, Machine(1e12, 1e10))}
    for kind in RECIPES["laptop"]:
        assert rows[f"{kind}: time per step"].median > 0
        assert rows[f"{kind}: matmul-only time / total time, torch kernels"].median > 0
    assert "energy: throughput relative to LlamaForCausalLM" in rows


def test_weights_read_by_a_step():
    """The output embedding is read once per chunk, by a chain head once per token."""
    for recipe, times in (("laptop-calm", 1), ("laptop-chain", 4)):
        model = model_of(config_of(recipe, "laptop", *TINY), 64)
        parts = [model.backbone, model.head, model.chunk_embedding.compress]
        parts += [model.autoencoder.decoder] if times == 1 else []
        numbers = sum(p.numel() for part in parts for p in part.parameters() if p.ndim > 1) + times * 64 * 16
        assert sum(weight.numel() for weight in generation.weights_of_step(model)) == numbers


def test_generation_rows(monkeypatch):
    monkeypatch.setattr(generation, "config_of", lambda recipe, size: config_of(recipe, size, *TINY))
    rows = {row.name: row for row in generation.measure("laptop", 1, Machine(1e12, 1e10))}
    for name in ("energy, int8, T = 1", "probit, T = 0.5", "chain, T = 0.5"):
        for baseline in ("LlamaForCausalLM.generate", "the Transformer in this engine"):
            assert rows[f"{name}: speedup over {baseline}"].median > 0
    for kind in ("energy", "chain", "probit"):
        assert rows[f"{kind}, T = 1: time per step"].median > rows[f"{kind}, T = 1: weight read time"].median > 0
        assert rows[f"{kind}, T = 1: weight read time / step time"].median < 1


def test_estimates_decrease_with_gpus():
    steps = [row for row in scaling.estimates("paper-calm-m") if "step" in row.name]
    assert [row.median for row in steps] == sorted((row.median for row in steps), reverse=True)
    assert all(row.low <= row.median for row in steps)


def test_error_messages(calm):
    for arguments, message in (
        (["trainning"], "did you mean training?"),
        (["training", "--size", "big"], "laptop, paper"),
    ):
        done = calm("bench", *arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert message in done.stderr


@pytest.mark.slow
def test_json_output(calm):
    done = calm("bench", "evaluation", "--rounds", "1", "--json")
    result = json.loads(done.stdout)
    assert result["machine"]["bytes_per_second"] > 0
    assert {"name", "median", "low", "high", "unit"} == set(result["evaluation"][0])
    assert SIZES[0] == result["size"]
