"""Generation benchmark: throughput compared with a Transformer, and step time compared with the memory bound.

At batch size 1, a decoding step is memory-bound: it reads every weight once, so the size of the weights divided by the
memory bandwidth is a lower bound on its time. The bandwidth of a shared machine varies over time, so reading the
weights (by summing them) is timed in turn with the steps.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from calm.bench.clock import Row, ratios, row, take_turns
from calm.bench.machine import Machine
from calm.bench.models import RECIPES, VOCABULARIES, as_transformers, config_of, model_of
from calm.generate.engine import Engine, Sequence, prepare_inference
from calm.generate.sampler import SamplingParams

PROMPT, NEW = 64, 64  # tokens
STEPS = 8  # decoding steps per timed call
PROMPT_VOCABULARY = 4096
TEMPERATURES = {"T = 1": 1.0, "T = 0.5": 0.5}
BASELINE, HUGGING_FACE = "Transformer", "LlamaForCausalLM.generate"
SAMPLED_ONLY = {"laptop": {"probit": "laptop-probit"}, "paper": {}}  # models that train like another one


def measure(size: str, rounds: int, machine: Machine) -> Iterator[Row]:
    vocabulary, recipes = VOCABULARIES[size], RECIPES[size] | SAMPLED_ONLY[size]
    models = {kind: model_of(config_of(name, size), vocabulary).eval() for kind, name in recipes.items()}
    ids = torch.randint(3, PROMPT_VOCABULARY, (1, PROMPT))
    generating: dict[str, Callable[[], object]] = {HUGGING_FACE: transformer(as_transformers(models[BASELINE]), ids)}
    stepping: dict[str, Callable[[], object]] = {}
    for kind, model in models.items():
        for name, temperature in TEMPERATURES.items():
            generating[f"{kind}, {name}"] = generation(model, ids, temperature)
        if kind != BASELINE:
            stepping[f"{kind}: steps"] = steps(model, ids, rounds)
            stepping[f"{kind}: reading"] = reading(model)
    quantized = model_of(config_of(RECIPES[size]["energy"], size), vocabulary).eval()
    prepare_inference(quantized, int8=True)
    generating["energy, int8, T = 1"] = generation(quantized, ids, 1.0)
    times = take_turns(generating | stepping, rounds)
    for name in generating:
        yield row(f"{name}: throughput", [NEW / seconds for seconds in times[name]], "tokens/s")
        if name == HUGGING_FACE:
            continue
        yield row(f"{name}: speedup over LlamaForCausalLM.generate", ratios(times[HUGGING_FACE], times[name]), "")
        if not name.startswith(BASELINE):
            own = times[f"{BASELINE}, {name.rpartition(', ')[2]}"]  # at the same temperature
            yield row(f"{name}: speedup over the Transformer in this engine", ratios(own, times[name]), "")
    for kind in models:
        if kind == BASELINE:
            continue
        step_times, read_times = times[f"{kind}: steps"], times[f"{kind}: reading"]
        yield row(f"{kind}, T = 1: time per step", [1e3 * seconds / STEPS for seconds in step_times], "ms")
        yield row(f"{kind}, T = 1: weight read time", [1e3 * seconds / STEPS for seconds in read_times], "ms")
        yield row(f"{kind}, T = 1: weight read time / step time", ratios(read_times, step_times), "")


def transformer(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    """transformers' `generate`."""
    fields = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **fields)


def generation(model: Any, ids: torch.Tensor, temperature: float) -> Callable[[], object]:
    """Generation of NEW tokens by the engine."""

    def run() -> None:
        engine = Engine(model, eos_token_id=-1, pad_token_id=0)
        prompts = enumerate(ids.tolist())
        engine.add(Sequence(prompt, seed, NEW, SamplingParams(temperature)) for seed, prompt in prompts)
        while engine.waiting or engine.running:
            engine.step()

    return run


def steps(model: Any, ids: torch.Tensor, rounds: int) -> Callable[[], object]:
    """A function that runs STEPS decoding steps per call. The prompts `ids` (B, T) are prefilled beforehand."""
    engine = Engine(model, eos_token_id=-1, pad_token_id=0)
    max_new_tokens = (2 + STEPS * (rounds + 1)) * model.chunk_size
    engine.add(Sequence(prompt, seed, max_new_tokens) for seed, prompt in enumerate(ids.tolist()))
    engine.step()
    return lambda: [engine.step() for _ in range(STEPS)]


def reading(model: Any) -> Callable[[], object]:
    """A function that reads the weights of a step STEPS times, by summing them at memory bandwidth."""
    weights = weights_of_step(model)

    @torch.no_grad()
    def run() -> None:
        for _ in range(STEPS):
            for weight in weights:
                weight.sum()

    return run


def weights_of_step(model: Any) -> list[torch.Tensor]:
    """Matrices that a decoding step reads at batch size 1, T = 1: all but the encoder and the input embedding."""
    embedding = model.chunk_embedding
    parts = [part for part in (model.backbone, embedding.compress, embedding.latent) if part is not None]
    return [*(p for part in parts for p in part.parameters() if p.ndim > 1), *model.head.streamed_weights()]
