"""What `train.compile` and CUDA graphs need: no graph breaks in a layer, a head, or a decoding step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from calm.config import load_config
from calm.heads import HEADS
from calm.llama import Llama, LlamaConfig, rotary_embedding
from calm.train.stages import described_model

SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_one_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Traced as one graph, with the values of the eager function."""
    explained: Any = torch._dynamo.explain(function)(*args, **kwargs)
    assert explained.graph_break_count == 0, explained.break_reasons
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*args, **kwargs)
    torch.testing.assert_close(compiled, function(*args, **kwargs), rtol=1e-5, atol=1e-6)


def make_model(head: str) -> Any:
    torch.manual_seed(0)
    model = described_model(load_config("toy-calm", [f"language_model.head={head}"]), 50)
    for parameter in model.head.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval()


def test_llama_layer():
    llama = Llama(LlamaConfig(**SIZES))
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rotary = rotary_embedding(torch.arange(6)[None], llama.config)
    assert_one_graph(llama.layers[0], x, rotary)


@pytest.mark.parametrize("head", HEADS)
def test_units_that_train_compile_compiles(head):
    """Every module that is compiled, with the inputs that it gets in a training step."""
    model = make_model(head)
    calls: dict[nn.Module, tuple] = {}
    for unit in model.compile_units():
        unit.register_forward_pre_hook(lambda module, args: calls.setdefault(module, args) and None)
    model.train()
    model(torch.randint(50, (2, 5, model.chunk_size)))
    units = model.compile_units()
    assert set(calls) == set(units)
    for unit in units:
        unit._forward_pre_hooks.clear()
        args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in calls[unit])
        assert_one_graph(unit, *args)


def test_energy_head():
    head = make_model("energy").head
    hidden = torch.randn(2, 3, head.mix.in_features, generator=torch.Generator().manual_seed(0))
    noise = torch.rand(4, 2, 3, head.noise_size, generator=torch.Generator().manual_seed(1)) - 0.5
    assert_one_graph(head.sample, hidden, 4, None, noise)


@torch.no_grad()
def test_decoding_step():
    """With a cache of slots, as on a GPU: the same graph for every step, whatever the lengths."""
    torch.manual_seed(0)
    llama = Llama(LlamaConfig(**SIZES)).eval()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    results = []
    for step in (torch.compile(llama, backend=backend, fullgraph=True), llama):
        batch = llama.new_batch()
        generator = torch.Generator().manual_seed(0)
        batch.add(torch.randn(3, 4, 32, generator=generator), [4, 2, 3], 16)
        cache, outputs = batch.cache, []
        cache.length = cache.capacity - 1
        for _ in range(4):
            x = torch.randn(3, 1, 32, generator=generator)
            mask = (torch.arange(cache.capacity) <= cache.next[:, None])[:, None, None]
            outputs.append(step(x, cache.next[:, None], mask, cache))
            cache.next += 1
            cache.length = cache.capacity - 1
        results.append(torch.cat(outputs))
    assert len(graphs) == 1
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
