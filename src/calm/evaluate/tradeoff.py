"""Accuracy and diversity at low temperatures, as in the paper's last two figures.

Accuracy P(y) and collision Σ P(x)², each estimated from several choices at every position of a text that was not
trained on, all on the true text before it. For CALM models with chunks of four tokens, and for softmax models.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from calm.data.shards import PreparedData
from calm.noise import RowNoise
from calm.sampling.mixture import Cut
from calm.sampling.next_chunk import Sampling, next_chunks
from calm.sampling.vocabulary import search_of
from calm.scores.brier import LONGEST, accuracy_and_collision
from calm.seeds import SeedStream, torch_seed

CONTEXT = 128  # tokens before a position
REDRAWS = 200  # of the positions, for the error of a geometric mean


def windows(data: Path, positions: int, split: str = "validation") -> tuple[Tensor, Tensor]:
    """Texts (P, CONTEXT) and the four tokens behind each."""
    stream = PreparedData(data).split(split)
    starts = torch.linspace(0, len(stream) - CONTEXT - LONGEST - 1, positions).long()
    rows = torch.stack([torch.tensor(stream[int(s) : int(s) + CONTEXT + LONGEST].astype("int64")) for s in starts])
    return rows[:, :CONTEXT], rows[:, CONTEXT:]


def measure(samples: Tensor, targets: Tensor) -> dict[str, Any]:
    """Samples (S, P, 4) → accuracy and collision of 1- to 4-grams in percent, with standard errors over positions."""
    accuracy, collision = accuracy_and_collision(samples, targets)  # (P, 4) each
    generator = torch.Generator().manual_seed(0)
    places = [torch.randint(len(accuracy), (len(accuracy),), generator=generator) for _ in range(REDRAWS)]
    found: dict[str, Any] = {}
    for name, values in (("accuracy", accuracy), ("collision", collision)):
        mean = 100 * values.double().mean(0)
        found[name] = mean.tolist()
        found[f"{name}_error"] = (100 * values.double().std(0) / len(values) ** 0.5).tolist()
        found[f"{name}_geometric"] = _geometric(mean)
        redrawn = [_geometric(100 * values.double()[rows].mean(0)) for rows in places]
        found[f"{name}_geometric_error"] = float(torch.tensor(redrawn).std())
    return found


def _geometric(means: Tensor) -> float:
    return float(means.clamp(min=0).prod() ** (1 / LONGEST))


@torch.no_grad()
def calm_samples(model: Any, hidden: Tensor, sampling: Sampling, draws: int, batch: int) -> tuple[Tensor, dict]:
    """Chunks chosen `draws` times at each position (S, P, 4), and what one cost."""
    search, samples, cost = search_of(model.autoencoder), [], []
    for draw in range(draws):
        parts = []
        for first in range(0, len(hidden), batch):
            rows = hidden[first : first + batch]
            noise = RowNoise([torch_seed(draw, SeedStream.TRADEOFF, first + row) for row in range(len(rows))])
            chosen = next_chunks(model, search, rows, sampling, noise)
            parts.append(chosen.chunks)
            cost.append([float(part.float().mean()) for part in chosen.cost])
        samples.append(torch.cat(parts))
    means = torch.tensor(cost).mean(0).tolist()
    return torch.stack(samples), dict(zip(("draws", "fallbacks", "unsettled"), means, strict=True))


@torch.no_grad()
def softmax_samples(model: Any, texts: Tensor, temperature: float, draws: int, batch: int) -> Tensor:
    cut, parts = Cut(temperature), []
    generator = torch.Generator().manual_seed(0)
    for first in range(0, len(texts), batch):
        cache = DynamicCache()
        ids = texts[first : first + batch]
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
        cache.batch_repeat_interleave(draws)
        logits, chosen = logits.repeat_interleave(draws, 0), []
        while True:
            chosen.append(torch.multinomial(cut.probabilities(logits), 1, generator=generator))
            if len(chosen) == LONGEST:
                break
            logits = model(input_ids=chosen[-1], past_key_values=cache, use_cache=True).logits[:, -1]
        parts.append(torch.cat(chosen, dim=1).unflatten(0, (-1, draws)))
    return torch.cat(parts).transpose(0, 1)
