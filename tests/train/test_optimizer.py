import pytest
import torch
from torch import nn

from calm.train.optimizer import adamw, learning_rate


def test_learning_rate_schedules():
    rates = {s: [learning_rate(i, 100, 2.0, 10, s) for i in range(100)] for s in ("constant", "linear", "cosine")}
    for values in rates.values():
        assert values[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
        assert max(values) == pytest.approx(2.0)
    assert rates["constant"][10:] == [2.0] * 90
    assert rates["linear"][55] == pytest.approx(1.0)
    assert rates["linear"][99] == pytest.approx(2.0 / 90)
    assert rates["cosine"][55] == pytest.approx(1.0)
    assert 0 < rates["cosine"][99] < 0.001
    assert learning_rate(0, 100, 2.0, 0, "constant") == 2.0


def test_weight_decay_applies_to_matrices_and_frozen_parameters_are_excluded():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(5, 3))
    model[2].weight.requires_grad_(False)
    matrices, others = adamw(model, (0.9, 0.95), 1e-8, 0.1).param_groups
    assert [p.shape for p in matrices["params"]] == [(3, 3)]
    assert matrices["weight_decay"] == 0.1
    assert len(others["params"]) == 3
    assert others["weight_decay"] == 0.0
    assert all(torch.is_tensor(p) and p.requires_grad for p in others["params"])
