"""Correctness and speed of the int8 vocabulary search (calm.cpu.search), on decoder states of a trained model.

    python benchmarks/vocabulary.py runs/laptop-calm/model --data data/embedded --states 1000000

Three quarters of the states come from samples of the model on held-out text, one quarter from the autoencoder's
posterior. Every result is compared with the argmax in float64. Two tokens count as tied if their logits differ by less
than the rounding error of an fp32 dot product, d·2⁻²⁴·|w|·|g|.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calm.checkpoint import load_calm
from calm.cpu import search
from calm.cpu.search import VocabularySearch
from calm.data.shards import PreparedData
from calm.scores.vocabulary import most_probable_tokens

CONTEXT, CANDIDATES, REPEATS = 128, 50, 7
BATCH_SIZES = (4, 50, 200, 800)


@torch.no_grad()
def decoder_states(model: Any, data: Path, count: int) -> Iterator[Tensor]:
    """States (n, d), about a thousand at a time."""
    stream = PreparedData(data).split("validation")
    generator = torch.Generator().manual_seed(0)
    while count > 0:
        start = int(torch.randint(len(stream) - CONTEXT, (), generator=generator))
        chunks = torch.tensor(stream[start : start + CONTEXT].astype("int64")).view(-1, model.chunk_size)
        hidden = model.hidden_states(chunks[None])[0, -4:]
        samples = model.head.sample(hidden, CANDIDATES, generator).flatten(0, 1)
        posterior = model.posterior(chunks)
        rows = torch.randint(len(posterior.mean), (len(samples) // 3,), generator=generator)
        noise = torch.randn(len(rows), posterior.mean.shape[1], generator=generator)
        latents = torch.cat([samples, posterior.mean[rows] + posterior.std[rows] * noise])
        states = model.autoencoder.decoder(latents).flatten(0, 1)[:count]
        count -= len(states)
        yield states


def count_errors(tokens: Tensor, states: Tensor, vocabulary: Tensor) -> tuple[int, int]:
    """Numbers of wrong tokens, and of tokens that are tied with the best; `vocabulary` is in float64."""
    best, expected = (
        torch.cat(parts)
        for parts in zip(*((part.double() @ vocabulary.T).max(1) for part in states.split(256)), strict=True)
    )
    differs = tokens != expected
    logits = (states[differs].double() * vocabulary[tokens[differs]]).sum(1)
    rounding = vocabulary.shape[1] * 2.0**-24 * vocabulary.norm(dim=1).max() * states[differs].double().norm(dim=1)
    wrong = int((best[differs] - logits > rounding).sum())
    return wrong, int(differs.sum()) - wrong


def median_seconds(function: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a CALM model with a vector head")
    parser.add_argument("--data", type=Path, required=True, help="prepared data")
    parser.add_argument("--states", type=int, default=20_000, help="number of states")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    search.MIN_VOCABULARY = 0  # search small vocabularies, too
    model: Any = load_calm(args.model)
    vocabulary = model.autoencoder.embedding.weight.detach()
    exact, vocabulary_search = vocabulary.double(), VocabularySearch(vocabulary)
    count = wrong = tied = 0
    for states in decoder_states(model, args.data, args.states):
        errors = count_errors(vocabulary_search(states), states, exact)
        count, wrong, tied = count + len(states), wrong + errors[0], tied + errors[1]
    print(f"{count:,} states, {len(vocabulary):,} tokens, {vocabulary.shape[1]} dimensions")
    if not vocabulary_search.searches:
        print("this CPU's int8 product is not exact: the search falls back to the full projection")
        return
    compared = len(vocabulary) * vocabulary_search.multiplied / vocabulary_search.asked
    print(f"{wrong} wrong ({wrong / count:.4%}), {tied} tied; tokens compared in fp32: {compared:.2f} per state")
    states = torch.cat(list(decoder_states(model, args.data, 1000)))
    for batch_size in BATCH_SIZES:
        batch = states[torch.randperm(len(states))[:batch_size]].contiguous()
        full = median_seconds(lambda batch=batch: most_probable_tokens(batch, vocabulary))
        speedup = full / median_seconds(lambda batch=batch: vocabulary_search(batch))
        print(f"{batch_size} states: full projection {1e3 * full:.1f} ms; speedup of the search {speedup:.2f}x")


if __name__ == "__main__":
    main()
