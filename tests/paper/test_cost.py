"""Costs against Table 1, the models' parameters, and the FLOPs that torch counts."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from calm.config import load_config, recipe_names
from calm.paper.cost import TABLE_1, cost_of
from calm.train.stages import described_model


@pytest.mark.parametrize("name", TABLE_1)
def test_table_1(name):
    parameters, training, inference = TABLE_1[name]
    cost = cost_of(name, load_config(name))
    assert abs(cost.parameters / parameters - 1) < 0.006
    assert abs(cost.inference_flops_per_token / inference - 1) < 0.05
    assert abs(cost.train_flops / training - 1) < 0.12
    with_autoencoder = cost.parameters_with_autoencoder - cost.parameters
    assert abs(with_autoencoder / 75e6 - 1) < 0.02 if "calm" in name else with_autoencoder == 0
    assert sum(part.parameters for part in cost.parts.values()) == cost.parameters_with_autoencoder


def test_every_shipped_recipe_has_a_cost():
    for name in recipe_names():
        if name != "finetune":
            assert cost_of(name, load_config(name), vocabulary=1000).train_flops > 0


@pytest.mark.parametrize("head", ["energy", "flow", "mean-flow", "diffusion", "chain", "probit"])
def test_inference_flops_match_those_counted_by_torch(head):
    settings = ["language_model.backbone.hidden_size=64", "language_model.num_sampling_steps=3"]
    settings += [f"language_model.head={head}", "language_model.backbone.intermediate_size=96"]
    config = load_config("toy-calm", settings)
    length, size = 8, config.data.chunk_size
    cost = cost_of("toy-calm", config, context=length, candidates=5, vocabulary=100)
    model = described_model(config, 100).eval()
    chunks = torch.zeros(1, length, size, dtype=torch.long)
    with torch.no_grad():
        model.head.propose(model.hidden_states(chunks), 1)  # what a probit head computes once for a model
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        hidden = model.hidden_states(chunks)
        model.head.propose(hidden, 1).tokens()
    counted = counter.get_total_flops() / (length * size)
    assert cost.inference_flops_per_token == pytest.approx(counted, rel=0.03)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        hidden = model.hidden_states(chunks)
        model.head.propose(hidden, 1 if head == "chain" else 5).tokens()  # a chain needs no candidates
    counted = counter.get_total_flops() / (length * size)
    assert cost.inference_flops_per_token_with_candidates == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(("head", "untied"), [("energy", False), ("chain", False), ("chain", True), ("probit", True)])
def test_training_flops_match_those_counted_by_torch(head, untied):
    config = load_config("toy-calm", [f"language_model.head={head}", f"language_model.untied_lm_head={untied}"])
    length, size = config.data.sequence_length // 4, 4
    cost = cost_of("mine", config, context=length, vocabulary=100)
    model = described_model(config, 100).train()
    chunks = torch.zeros(1, length + 1, size, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(chunks)["loss"].backward()
    counted = counter.get_total_flops() / (length * size)
    per_token = sum(part.train_flops_per_token for part in cost.parts.values())
    assert per_token == pytest.approx(counted, rel=0.1)  # the formula leaves out the products of the loss


def test_command(calm):
    done = calm("cost", "paper-calm-m", "toy-autoencoder", "--samples", 7, "--vocabulary", 500, "--json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert {"name", "parameters", "train_flops", "inference_flops_per_token", "parts"} <= first.keys()
    assert (first["name"], second["name"]) == ("paper-calm-m", "toy-autoencoder")
    assert first["candidates"] == 7
    assert {"backbone", "attention", "chunk embedding", "head", "autoencoder", "vocabulary projection"} <= first[
        "parts"
    ].keys()
    done = calm("cost", "paper-calm-mm")
    assert done.returncode == 2
    assert "did you mean paper-calm-m" in done.stderr
