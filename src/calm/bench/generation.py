"""Generation benchmark: throughput compared with a Transformer, and step time compared with the memory bound.

At batch size 1, a decoding step is memory-bound: it reads every weight once, so the size of the weights divided by the
memory bandwidth is a lower bound on its time. The bandwidth of a shared machine varies over time, so reading the
weights (by summing them) is timed in turn with the steps.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from calm.bench.clock import Row, ratios, row, take_turns
from calm.bench.machine import Machine
from calm.bench.models import RECIPES, VOCABULARIES, config_of, model_of
from calm.heads import ChainHead
from calm.models.calm import CalmForCausalLM
from calm.models.int8 import to_int8
from calm.sampling.batch import Batch, Text
from calm.sampling.predictor import CalmPredictor
from calm.sampling.vocabulary import search_of

PROMPT, NEW = 64, 64  # tokens
STEPS = 8  # decoding steps per timed call
PROMPT_VOCABULARY = 4096


def measure(size: str, rounds: int, machine: Machine) -> Iterator[Row]:
    vocabulary = VOCABULARIES[size]
    models = {kind: model_of(config_of(name, size), vocabulary).eval() for kind, name in RECIPES[size].items()}
    ids = torch.randint(3, PROMPT_VOCABULARY, (1, PROMPT))
    generating: dict[str, Callable[[], object]] = {"Transformer": transformer(models["Transformer"], ids)}
    stepping: dict[str, Callable[[], object]] = {}
    for kind, model in models.items():
        if isinstance(model, CalmForCausalLM):
            generating[f"{kind}, T = 1"] = calm(model, ids, 1.0)
            generating[f"{kind}, T = 0.5"] = calm(model, ids, 0.5)
            stepping[f"{kind}: steps"] = steps(model, ids, rounds)
            stepping[f"{kind}: reading"] = reading(model)
    quantized = copy.deepcopy(models["energy"])
    to_int8(quantized)
    generating["energy, int8, T = 1"] = calm(quantized, ids, 1.0)
    times = take_turns(generating | stepping, rounds)
    for name in generating:
        yield row(f"{name}: throughput", [NEW / seconds for seconds in times[name]], "tokens/s")
        if name != "Transformer":
            yield row(f"{name}: speedup over LlamaForCausalLM.generate", ratios(times["Transformer"], times[name]), "")
    for kind, model in models.items():
        if isinstance(model, CalmForCausalLM):
            step_times, read_times = times[f"{kind}: steps"], times[f"{kind}: reading"]
            yield row(f"{kind}, T = 1: time per step", [1e3 * seconds / STEPS for seconds in step_times], "ms")
            yield row(f"{kind}, T = 1: weight read time", [1e3 * seconds / STEPS for seconds in read_times], "ms")
            yield row(f"{kind}, T = 1: weight read time / step time", ratios(read_times, step_times), "")


def transformer(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    fields = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **fields)


def calm(model: CalmForCausalLM, ids: torch.Tensor, temperature: float) -> Callable[[], object]:
    fields: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "eos_token_id": -1, "pad_token_id": 0}

    def run() -> object:
        return model.generate(ids, generator=torch.Generator().manual_seed(0), **fields)

    return run


def steps(model: CalmForCausalLM, ids: torch.Tensor, rounds: int) -> Callable[[], object]:
    """A function that runs STEPS decoding steps per call. The prompts `ids` (B, T) are prefilled beforehand."""
    batch = Batch(CalmPredictor(model), eos_token_id=-1, pad_token_id=0)
    max_new_tokens = (2 + STEPS * (rounds + 1)) * model.config.chunk_size
    batch.join([Text(prompt, seed, max_new_tokens) for seed, prompt in enumerate(ids.tolist())])
    batch.step()
    return lambda: [batch.step() for _ in range(STEPS)]


def reading(model: CalmForCausalLM) -> Callable[[], object]:
    """A function that reads the weights of a step STEPS times, by summing them at memory bandwidth."""
    weights = weights_of_step(model)

    @torch.no_grad()
    def run() -> None:
        for _ in range(STEPS):
            for weight in weights:
                weight.sum()

    return run


def weights_of_step(model: CalmForCausalLM) -> list[torch.Tensor]:
    """The matrices read by a decoding step at batch size 1 and temperature 1: all but the encoder and input embedding.

    A chain head reads the output embedding for each token of a chunk, other heads once per chunk. Large vocabularies
    are read in int8, which is counted as a quarter of the embedding.
    """
    head, embedding = model.head, model.words
    parts = [model.backbone, model.chunk_embedding.compress, model.chunk_embedding.latent, head]
    times = 1
    if isinstance(head, ChainHead):
        times = model.config.chunk_size - (head.own_words is not None)  # if untied, it is also a parameter of the head
    else:
        parts.append(model.autoencoder.decoder)
        embedding = embedding[: len(embedding) // 4] if search_of(model.autoencoder).searches else embedding
    weights = [p for part in parts if part is not None for p in part.parameters() if p.ndim > 1]
    return [*weights, *[embedding] * times]
