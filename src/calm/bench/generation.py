"""Generation: tokens a second against a Transformer's, and against the time that reading the weights takes.

A step of a single text computes little and reads every weight once, so that the bytes of the weights over the memory's
bandwidth bound it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from calm.bench.clock import Row, ratios, row, take_turns
from calm.bench.machine import Machine
from calm.bench.models import RECIPES, VOCABULARIES, config_of, model_of
from calm.heads import ChainHead
from calm.models.calm import CalmForCausalLM

PROMPT, NEW = 64, 64  # tokens
WORDS_OF_PROMPTS = 4096


def measure(size: str, rounds: int, machine: Machine) -> Iterator[Row]:
    vocabulary = VOCABULARIES[size]
    models = {kind: model_of(config_of(name, size), vocabulary).eval() for kind, name in RECIPES[size].items()}
    ids = torch.randint(3, WORDS_OF_PROMPTS, (1, PROMPT))
    ways: dict[str, Callable[[], object]] = {"Transformer": transformer(models["Transformer"], ids)}
    for kind, model in models.items():
        if isinstance(model, CalmForCausalLM):
            ways[f"{kind}, T = 1"] = calm(model, ids, 1.0)
            ways[f"{kind}, T = 0.5"] = calm(model, ids, 0.5)
    times = take_turns(ways, rounds)
    for name, seconds in times.items():
        yield row(f"{name}: generation", [NEW / spent for spent in seconds], "tokens/s")
        if name != "Transformer":
            yield row(f"{name}: times LlamaForCausalLM.generate", ratios(times["Transformer"], seconds), "")
    for kind, model in models.items():
        if isinstance(model, CalmForCausalLM):
            seconds = times[f"{kind}, T = 1"]
            steps = NEW // model.config.chunk_size
            least = bytes_of_step(model) / machine.bandwidth
            yield row(f"{kind}, T = 1: a step", [1e3 * spent / steps for spent in seconds], "ms")
            yield row(f"{kind}, T = 1: reading its weights once", [1e3 * least], "ms")
            yield row(f"{kind}, T = 1: share of that bound", [least * steps / spent for spent in seconds], "")


def transformer(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    fields = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **fields)


def calm(model: CalmForCausalLM, ids: torch.Tensor, temperature: float) -> Callable[[], object]:
    fields: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "eos_token_id": -1, "pad_token_id": 0}

    def run() -> object:
        return model.generate(ids, generator=torch.Generator().manual_seed(0), **fields)

    return run


def bytes_of_step(model: CalmForCausalLM) -> float:
    """Of the weights that a step of one text at temperature 1 reads: all but the encoder and the embedding's words.

    A chain reads the words of the vocabulary for each of its tokens, other heads once for all.
    """
    head, words = model.head, model.words.numel()
    parts = [model.backbone, model.chunk_embedding.compress, model.chunk_embedding.latent, head]
    times = 1
    if isinstance(head, ChainHead):
        times = model.config.chunk_size - (head.own_words is not None)  # own words are weights of the head already
    else:
        parts.append(model.autoencoder.decoder)
    numbers = sum(p.numel() for part in parts if part is not None for p in part.parameters())
    return float(numbers + times * words) * model.words.element_size()
