"""Training: a step against its own matrix products, against the machine's peak, and against a Transformer."""

from collections.abc import Callable, Iterator

from torch import nn

from calm.bench.clock import Row, ratios, row, take_turns
from calm.bench.machine import Machine
from calm.bench.matmuls import Products
from calm.bench.models import RECIPES, VOCABULARIES, Training, config_of
from calm.config import RunConfig
from calm.linear import FastLinear
from calm.models.calm import CalmForCausalLM
from calm.paper.cost import cost_of


def measure(size: str, rounds: int, machine: Machine) -> Iterator[Row]:
    vocabulary = VOCABULARIES[size]
    steps = {
        kind: Training(config_of(recipe, size), vocabulary, nn.Linear if kind == "Transformer" else FastLinear)
        for kind, recipe in RECIPES[size].items()
    }
    ways: dict[str, Callable[[], object]] = {}
    for kind, training in steps.items():
        training.step()  # makes the optimizer's states, which are no part of a step
        ways[kind] = training.step
        ways |= _products(kind, training.step)
    head = Head(steps["energy"])
    ways |= {"head": head.run} | _products("head", head.run)
    times = take_turns(ways, rounds)
    for kind, training in steps.items():
        speeds = [training.tokens / seconds for seconds in times[kind]]
        yield row(f"{kind}: a step", [1e3 * seconds for seconds in times[kind]], "ms")
        yield row(f"{kind}: training", speeds, "tokens/s")
        yield from _shares(kind, kind, times)
        flops = flops_of(training.config, training.tokens, vocabulary)
        yield row(
            f"{kind}: share of the matmul peak, FLOPs of calm cost",
            [flops / seconds / machine.peak for seconds in times[kind]],
            "",
        )
        if kind != "Transformer":
            per_token = [seconds / training.tokens for seconds in times[kind]]
            theirs = [seconds / steps["Transformer"].tokens for seconds in times["Transformer"]]
            yield row(f"{kind}: tokens/s, times LlamaForCausalLM's", ratios(theirs, per_token), "")
    samples = steps["energy"].model.config.num_model_samples
    yield from _shares("head", f"energy head and loss, N = {samples}", times)


def _products(kind: str, way: Callable[[], object]) -> dict[str, Callable[[], object]]:
    products = Products(way)
    return {f"{kind} products": products.run, f"{kind} own products": products.run_own}


def _shares(kind: str, name: str, times: dict[str, list[float]]) -> Iterator[Row]:
    """Of a loop over torch's own products, which a share above 1 is faster than, and over ours."""
    shares = ratios(times[f"{kind} products"], times[kind])
    yield row(f"{name}: share of a bare loop over its matrix products", shares, "")
    shares = ratios(times[f"{kind} own products"], times[kind])
    yield row(f"{name}: the same, as they are multiplied here", shares, "")


def flops_of(config: RunConfig, tokens: int, vocabulary: int) -> float:
    """Of a step, by `calm cost`."""
    context = config.data.sequence_length // (1 if config.stage == "transformer" else config.data.chunk_size)
    parts = cost_of("", config, context=context, vocabulary=vocabulary).parts.values()
    return tokens * sum(part.train_flops_per_token for part in parts)


class Head:
    """The head and its loss, forward and backward, on hidden states of a text."""

    def __init__(self, training: Training):
        model = training.model
        assert isinstance(model, CalmForCausalLM)
        ids, size = training.given["input_ids"], model.config.chunk_size
        self.head = model.head
        self.hidden = model.hidden_states(ids[:, :-size]).detach().requires_grad_()
        self.posterior = model.posterior(model.chunks(ids)[:, 1:])

    def run(self) -> None:
        self.head.loss(self.hidden, self.posterior).backward()  # pyright: ignore[reportCallIssue]
        self.head.zero_grad()
        self.hidden.grad = None
