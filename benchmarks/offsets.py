"""Does the next chunk get worse where a prompt does not end on a chunk border of its own?

    python benchmarks/offsets.py runs/laptop-calm/model --data data/embedded

The same targets behind prompts of 64, 63, … 64 - (K - 1) tokens: the shorter ones are filled at their front.
Differences are paired, target by target.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calm.data.shards import PreparedData
from calm.models.loading import load_calm
from calm.sampling.vocabulary import search_of
from calm.scores.brier import LONGEST, brier_of_samples


@torch.no_grad()
def scores(model: Any, texts: Tensor, targets: Tensor, samples: int) -> Tensor:
    """Brier-1 to Brier-4 of the next chunk, in percent: (P, 4)."""
    found = []
    for text, target in zip(texts.split(100), targets.split(100), strict=True):
        hidden = model.hidden_states(text)[:, -1]
        generator = torch.Generator().manual_seed(0)
        drawn = model.draw(hidden, samples, generator, search_of(model.autoencoder))
        found.append(100 * brier_of_samples(drawn[..., :LONGEST], target).double())
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--positions", type=int, default=4000)
    parser.add_argument("--length", type=int, default=64, help="a multiple of K")
    parser.add_argument("--samples", type=int, default=16)
    options = parser.parse_args()
    model = load_calm(options.model).eval()
    data = PreparedData(options.data)
    stream = data.split("validation")
    size, number = model.config.chunk_size, min(options.positions, (len(stream) - options.length) // LONGEST - 1)
    starts = torch.linspace(0, len(stream) - options.length - LONGEST - 1, number).long()
    rows = torch.stack(
        [torch.tensor(stream[int(s) : int(s) + options.length + LONGEST].astype("int64")) for s in starts]
    )
    whole = None
    for fill in range(size):
        texts = rows[:, : options.length].clone()
        texts[:, :fill] = data.tokenizer.pad_token_id
        found = scores(model, texts, rows[:, options.length :], options.samples)
        whole = found if whole is None else whole
        error, difference = found.std(0) / number**0.5, found - whole
        paired = difference.std(0) / number**0.5
        print(f"prompt of {options.length - fill} tokens, {fill} fill:")
        for n in range(LONGEST):
            print(
                f"    Brier-{n + 1} {found[:, n].mean():.3f} ± {error[n]:.3f}   "
                f"difference {difference[:, n].mean():+.3f} ± {paired[n]:.3f}"
            )


if __name__ == "__main__":
    main()
