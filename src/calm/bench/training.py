"""Training benchmark: step time compared with its matmuls alone, with the matmul peak, and with a Transformer."""

from collections.abc import Callable, Iterator

from calm.bench.clock import Row, ratios, row, take_turns
from calm.bench.machine import Machine
from calm.bench.matmuls import Products
from calm.bench.models import RECIPES, VOCABULARIES, Training, TransformersTraining, config_of
from calm.config import RunConfig
from calm.paper.cost import cost_of


def measure(size: str, rounds: int, machine: Machine) -> Iterator[Row]:
    vocabulary = VOCABULARIES[size]
    steps = {
        kind: (TransformersTraining if kind == "Transformer" else Training)(config_of(recipe, size), vocabulary)
        for kind, recipe in RECIPES[size].items()
    }
    functions: dict[str, Callable[[], object]] = {}
    for kind, training in steps.items():
        training.step()  # allocates the optimizer state, which is not part of a step
        functions[kind] = training.step
        functions |= _products(kind, training.step)
    head = Head(steps["energy"])
    functions |= {"head": head.run} | _products("head", head.run)
    times = take_turns(functions, rounds)
    for kind, training in steps.items():
        yield row(f"{kind}: time per step", [1e3 * seconds for seconds in times[kind]], "ms")
        yield row(f"{kind}: throughput", [training.tokens / seconds for seconds in times[kind]], "tokens/s")
        yield from _shares(kind, kind, times)
        flops = flops_of(training.config, training.tokens, vocabulary)
        utilization = [flops / seconds / machine.peak for seconds in times[kind]]
        yield row(f"{kind}: MFU (FLOPs by calm cost / matmul peak)", utilization, "")
        if kind != "Transformer":
            per_token = [seconds / training.tokens for seconds in times[kind]]
            baseline = [seconds / steps["Transformer"].tokens for seconds in times["Transformer"]]
            yield row(f"{kind}: throughput relative to LlamaForCausalLM", ratios(baseline, per_token), "")
    samples = steps["energy"].model.config.num_model_samples
    yield from _shares("head", f"energy head and loss, N = {samples}", times)


def _products(kind: str, function: Callable[[], object]) -> dict[str, Callable[[], object]]:
    products = Products(function)
    return {f"{kind} products": products.run, f"{kind} own products": products.run_own}


def _shares(kind: str, name: str, times: dict[str, list[float]]) -> Iterator[Row]:
    """Time of the matmuls alone relative to the whole: with torch's kernels (can exceed 1), and with our kernels."""
    for products, kernels in (("products", "torch kernels"), ("own products", "own kernels")):
        shares = ratios(times[f"{kind} {products}"], times[kind])
        yield row(f"{name}: matmul-only time / total time, {kernels}", shares, "")


def flops_of(config: RunConfig, tokens: int, vocabulary: int) -> float:
    """FLOPs of a training step, as counted by `calm cost`."""
    context = config.data.sequence_length // (1 if config.stage == "transformer" else config.data.chunk_size)
    parts = cost_of("", config, context=context, vocabulary=vocabulary).parts.values()
    return tokens * sum(part.train_flops_per_token for part in parts)


class Head:
    """Forward and backward pass of the head and its loss, on precomputed hidden states."""

    def __init__(self, training: Training):
        model = training.model
        chunks = training.inputs["chunks"]
        self.head = model.head
        self.hidden = model.hidden_states(chunks[:, :-1]).detach().requires_grad_()
        self.posterior = model.posterior(chunks[:, 1:])

    def run(self) -> None:
        self.head.latent_loss(self.hidden, self.posterior).backward()
        self.head.zero_grad()
        self.hidden.grad = None
