"""Generation: tokens a second against a Transformer's, and against the time that reading the weights takes.

A step of a single text computes little and reads every weight once, so that the bytes of the weights over the memory's
bandwidth bound it. The bandwidth of a shared machine changes from minute to minute: the weights are read, to be summed,
beside every measured step.
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
STEPS = 8  # of a text that goes on, at once
WORDS_OF_PROMPTS = 4096


def measure(size: str, rounds: int, machine: Machine) -> Iterator[Row]:
    vocabulary = VOCABULARIES[size]
    models = {kind: model_of(config_of(name, size), vocabulary).eval() for kind, name in RECIPES[size].items()}
    ids = torch.randint(3, WORDS_OF_PROMPTS, (1, PROMPT))
    writing: dict[str, Callable[[], object]] = {"Transformer": transformer(models["Transformer"], ids)}
    stepping: dict[str, Callable[[], object]] = {}
    for kind, model in models.items():
        if isinstance(model, CalmForCausalLM):
            writing[f"{kind}, T = 1"] = calm(model, ids, 1.0)
            writing[f"{kind}, T = 0.5"] = calm(model, ids, 0.5)
            stepping[f"{kind}: steps"] = steps(model, ids, rounds)
            stepping[f"{kind}: reading"] = reading(model)
    small = copy.deepcopy(models["energy"])
    to_int8(small)
    writing["energy, int8, T = 1"] = calm(small, ids, 1.0)
    times = take_turns(writing | stepping, rounds)
    for name in writing:
        yield row(f"{name}: generation", [NEW / spent for spent in times[name]], "tokens/s")
        if name != "Transformer":
            yield row(f"{name}: times LlamaForCausalLM.generate", ratios(times["Transformer"], times[name]), "")
    for kind, model in models.items():
        if isinstance(model, CalmForCausalLM):
            spent, least = times[f"{kind}: steps"], times[f"{kind}: reading"]
            yield row(f"{kind}, T = 1: a step", [1e3 * seconds / STEPS for seconds in spent], "ms")
            yield row(f"{kind}, T = 1: reading its weights once", [1e3 * seconds / STEPS for seconds in least], "ms")
            yield row(f"{kind}, T = 1: share of that bound", ratios(least, spent), "")


def transformer(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    fields = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **fields)


def calm(model: CalmForCausalLM, ids: torch.Tensor, temperature: float) -> Callable[[], object]:
    fields: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "eos_token_id": -1, "pad_token_id": 0}

    def run() -> object:
        return model.generate(ids, generator=torch.Generator().manual_seed(0), **fields)

    return run


def steps(model: CalmForCausalLM, ids: torch.Tensor, rounds: int) -> Callable[[], object]:
    """Some steps of texts (B, T) that are longer with every call, the prompts read before the first."""
    batch = Batch(CalmPredictor(model), eos_token_id=-1, pad_token_id=0)
    most = (2 + STEPS * (rounds + 1)) * model.config.chunk_size
    batch.join([Text(prompt, seed, most) for seed, prompt in enumerate(ids.tolist())])
    batch.step()
    return lambda: [batch.step() for _ in range(STEPS)]


def reading(model: CalmForCausalLM) -> Callable[[], object]:
    """As often as they take steps: all numbers summed, which nothing does faster than memory gives them."""
    weights = weights_of_step(model)

    @torch.no_grad()
    def run() -> None:
        for _ in range(STEPS):
            for weight in weights:
                weight.sum()

    return run


def weights_of_step(model: CalmForCausalLM) -> list[torch.Tensor]:
    """The matrices that a step of one text at temperature 1 reads: all but the encoder and the embedding's words.

    A chain reads the words of the vocabulary for each of its tokens, other heads once for all, and in eight bits where
    they are many: as many bytes as a quarter of them has.
    """
    head, words = model.head, model.words
    parts = [model.backbone, model.chunk_embedding.compress, model.chunk_embedding.latent, head]
    times = 1
    if isinstance(head, ChainHead):
        times = model.config.chunk_size - (head.own_words is not None)  # own words are weights of the head already
    else:
        parts.append(model.autoencoder.decoder)
        words = words[: len(words) // 4] if search_of(model.autoencoder).searches else words
    weights = [p for part in parts if part is not None for p in part.parameters() if p.ndim > 1]
    return [*weights, *[words] * times]
