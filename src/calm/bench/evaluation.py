"""Evaluation benchmark: BrierLM at every position of a text, compared with a single Transformer forward pass."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from calm.bench.clock import Row, ratios, row, take_turns
from calm.bench.machine import Machine
from calm.bench.matmuls import Products
from calm.bench.models import RECIPES, VOCABULARIES, as_transformers, config_of, model_of
from calm.evaluate.estimators import estimator_of
from calm.noise import RowNoise
from calm.scores.brier import MAX_NGRAM

ROWS, LENGTH, SAMPLES = 4, 256, 2


@torch.no_grad()
def measure(size: str, rounds: int, machine: Machine) -> Iterator[Row]:
    vocabulary = VOCABULARIES[size]
    models = {kind: model_of(config_of(name, size), vocabulary).eval() for kind, name in RECIPES[size].items()}
    tokens = torch.randint(vocabulary, (ROWS, LENGTH + MAX_NGRAM))
    forward: Any = as_transformers(models["Transformer"])
    functions: dict[str, Callable[[], object]] = {"forward": lambda: forward(input_ids=tokens, use_cache=False)}
    for kind, model in models.items():
        function = _estimate(estimator_of(model, LENGTH, SAMPLES), tokens)
        functions |= {kind: function, f"{kind} products": Products(function).run}
    times = take_turns(functions, rounds)
    for kind in models:
        yield row(f"{kind}: BrierLM throughput", [ROWS * LENGTH / seconds for seconds in times[kind]], "tokens/s")
        yield row(f"{kind}: time relative to LlamaForCausalLM forward pass", ratios(times[kind], times["forward"]), "")
        shares = ratios(times[f"{kind} products"], times[kind])
        yield row(f"{kind}: matmul-only time / total time", shares, "")


def _estimate(estimator: Any, tokens: torch.Tensor) -> Callable[[], object]:
    return lambda: estimator.estimate(tokens, RowNoise(list(range(ROWS))))
