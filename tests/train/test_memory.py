"""The estimated memory of training: what several processes share, and what each holds whole."""

import pytest

from calm.config import load_config
from calm.train.memory import gpu_training_memory, training_memory
from calm.train.stages import described_model


@pytest.fixture(scope="module")
def model():
    return described_model(load_config("toy-calm"), 500)


def test_a_shard_size_above_the_number_of_processes_shares_nothing(model):
    alone, sharded = load_config("toy-calm"), load_config("toy-calm", ["train.shard_size=8"])
    for estimate in (training_memory, gpu_training_memory):
        assert estimate(model, sharded, 1, 1) == estimate(model, alone, 1, 1)
        assert estimate(model, sharded, 1, 8) == estimate(model, alone, 1, 8)
        assert estimate(model, sharded, 1, 64) > estimate(model, alone, 1, 64)


def test_accumulated_gradients_are_whole_in_every_process(model):
    once, often = load_config("toy-calm"), load_config("toy-calm", ["train.accumulation=2"])
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert gpu_training_memory(model, often, 1, 8) - gpu_training_memory(model, once, 1, 8) == 4 * trained
    assert gpu_training_memory(model, often, 1, 1) == gpu_training_memory(model, once, 1, 1)


def test_the_frozen_autoencoder_is_whole_in_every_process(model):
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert training_memory(model, load_config("toy-calm"), 0, 10**6) >= 2 * 4 * frozen
