"""Is the vocabulary search right, and how much faster is it? On states of trained models.

    python benchmarks/vocabulary.py runs/laptop-calm/model --data data/embedded --states 1000000

States are those of candidates that the model draws behind a text it was not trained on, a quarter of them posterior
samples of the autoencoder. Every answer is compared with the argmax in float64. Two words whose values differ by less
than what a product in fp32 may be off (d·2⁻²⁴·|w|·|g|) count as tied.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calm.data.shards import PreparedData
from calm.models.loading import load_calm
from calm.sampling import vocabulary
from calm.sampling.vocabulary import VocabularySearch
from calm.scores.vocabulary import most_probable_words

WINDOW, CANDIDATES = 128, 50


@torch.no_grad()
def states(model: Any, data: Path, number: int) -> Iterator[Tensor]:
    """About a thousand at a time."""
    stream, size = PreparedData(data).split("validation"), model.config.chunk_size
    generator = torch.Generator().manual_seed(0)
    while number > 0:
        start = int(torch.randint(len(stream) - WINDOW, (), generator=generator))
        ids = torch.tensor(stream[start : start + WINDOW].astype("int64"))
        hidden = model.hidden_states(ids[None])[0, -4:]
        drawn = model.head.sample(hidden, CANDIDATES, generator).flatten(0, 1)
        posterior = model.posterior(ids.view(-1, size))
        rows = torch.randint(len(posterior.mean), (len(drawn) // 3,), generator=generator)
        own = posterior.mean[rows] + posterior.log_std[rows].exp() * torch.randn(
            len(rows), posterior.mean.shape[1], generator=generator
        )
        found = model.autoencoder.decoder(torch.cat([drawn, own])).flatten(0, 1)[:number]
        number -= len(found)
        yield found


def check(search: VocabularySearch, found: Tensor, words: Tensor, best: Tensor, ids: Tensor) -> tuple[int, int]:
    """Answers that are wrong, and answers that are tied with the best."""
    other = search(found)
    differs = other != ids
    values = (found[differs].double() * words[other[differs]]).sum(1)
    rounding = words.shape[1] * 2.0**-24 * words.norm(dim=1).max() * found[differs].double().norm(dim=1)
    wrong = int((best[differs] - values > rounding).sum())
    return wrong, int(differs.sum()) - wrong


def seconds(function: Any, *arguments: Any) -> float:
    times = []
    for _ in range(7):
        began = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--states", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    vocabulary.SMALL = 0  # search small vocabularies, too
    model: Any = load_calm(options.model).eval()
    words = model.autoencoder.embedding.weight.detach()
    exact = words.double()
    search = VocabularySearch(words)
    number = wrong = tied = 0
    for found in states(model, options.data, options.states):
        best, ids = zip(*((found_part.double() @ exact.T).max(1) for found_part in found.split(256)), strict=True)
        here = check(search, found, exact, torch.cat(best), torch.cat(ids))
        number, wrong, tied = number + len(found), wrong + here[0], tied + here[1]
    print(f"{number:,} states, {len(words):,} words of {words.shape[1]} dimensions")
    left = len(words) * search.multiplied / search.asked
    print(f"{wrong} wrong ({wrong / number:.4%}), {tied} tied; words multiplied as they are: {left:.2f} a state")
    some = torch.cat(list(states(model, options.data, 1000)))
    for rows in (4, 50, 200, 800):
        part = some[torch.randperm(len(some))[:rows]].contiguous()
        whole = seconds(most_probable_words, part, words)
        ratio = whole / seconds(search, part)
        print(f"{rows} states: full projection {1e3 * whole:.1f} ms; the search is {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()
