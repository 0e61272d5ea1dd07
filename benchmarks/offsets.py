"""Are predictions worse if the prompt does not consist of whole chunks?

    python benchmarks/offsets.py runs/laptop-calm/model --data data/embedded

Brier scores of the same targets after prompts of 64, 63, …, 64 - (K - 1) tokens; shorter prompts are padded at their
front. Differences are paired by target.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calm.checkpoint import load_calm
from calm.data.shards import PreparedData
from calm.generate.engine import prepare_inference
from calm.scores.brier import MAX_NGRAM, brier_of_samples

BATCH_SIZE = 100


@torch.no_grad()
def brier_scores(model: Any, prompts: Tensor, targets: Tensor, num_samples: int) -> Tensor:
    """Brier-1 to Brier-4 of the tokens after prompts (P, T), in percent: (P, 4)."""
    scores = []
    for ids, target in zip(prompts.split(BATCH_SIZE), targets.split(BATCH_SIZE), strict=True):
        hidden = model.hidden_states(ids.unflatten(1, (-1, model.chunk_size)))[:, -1]
        generator = torch.Generator().manual_seed(0)
        samples = model.head.propose(hidden, num_samples, generator).tokens()
        scores.append(100 * brier_of_samples(samples[..., :MAX_NGRAM], target).double())
    return torch.cat(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--data", type=Path, required=True, help="prepared data")
    parser.add_argument("--positions", type=int, default=4000, help="number of prompts")
    parser.add_argument("--length", type=int, default=64, help="tokens of the longest prompt, a multiple of K")
    parser.add_argument("--samples", type=int, default=16, help="per prompt")
    args = parser.parse_args()
    model = load_calm(args.model)
    prepare_inference(model)
    data = PreparedData(args.data)
    stream = data.split("validation")
    count = min(args.positions, (len(stream) - args.length) // MAX_NGRAM - 1)
    starts = torch.linspace(0, len(stream) - args.length - MAX_NGRAM - 1, count).long()
    rows = torch.stack(
        [torch.tensor(stream[int(s) : int(s) + args.length + MAX_NGRAM].astype("int64")) for s in starts]
    )
    baseline = None  # without padding
    for padding in range(model.chunk_size):
        prompts = rows[:, : args.length].clone()
        prompts[:, :padding] = data.tokenizer.pad_token_id
        scores = brier_scores(model, prompts, rows[:, args.length :], args.samples)
        baseline = scores if baseline is None else baseline
        error, difference = scores.std(0) / count**0.5, scores - baseline
        paired_error = difference.std(0) / count**0.5
        print(f"prompt of {args.length - padding} tokens, {padding} padding tokens:")
        for n in range(MAX_NGRAM):
            print(
                f"    Brier-{n + 1} {scores[:, n].mean():.3f} ± {error[n]:.3f}   "
                f"difference {difference[:, n].mean():+.3f} ± {paired_error[n]:.3f}"
            )


if __name__ == "__main__":
    main()
