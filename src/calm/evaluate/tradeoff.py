"""Accuracy and diversity at low temperatures, as in the paper's last two figures.

Accuracy P(y) and collision Σ P(x)², each estimated from several samples at every position of held-out text, given the
true text before it. For CALM models with chunks of four tokens, and for Transformers.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calm.data.shards import PreparedData
from calm.generate.engine import prepare_inference
from calm.generate.mixture import LogitsProcessor
from calm.generate.sampler import SamplingParams, sample_chunks
from calm.noise import RowNoise
from calm.scores.brier import MAX_NGRAM, accuracy_and_collision
from calm.seeds import SeedStream, torch_seed

CONTEXT = 128  # tokens before a position
RESAMPLES = 200  # bootstrap samples for the error of a geometric mean


def windows(data: Path, positions: int, split: str = "validation") -> tuple[Tensor, Tensor]:
    """Texts (P, CONTEXT) and the four tokens after each."""
    stream = PreparedData(data).split(split)
    starts = torch.linspace(0, len(stream) - CONTEXT - MAX_NGRAM - 1, positions).long()
    rows = torch.stack([torch.tensor(stream[int(s) : int(s) + CONTEXT + MAX_NGRAM].astype("int64")) for s in starts])
    return rows[:, :CONTEXT], rows[:, CONTEXT:]


def measure(samples: Tensor, targets: Tensor) -> dict[str, Any]:
    """Samples (S, P, 4) → accuracy and collision of 1- to 4-grams in percent, with standard errors over positions."""
    accuracy, collision = accuracy_and_collision(samples, targets)  # (P, 4) each
    generator = torch.Generator().manual_seed(0)
    places = [torch.randint(len(accuracy), (len(accuracy),), generator=generator) for _ in range(RESAMPLES)]
    results: dict[str, Any] = {}
    for name, values in (("accuracy", accuracy), ("collision", collision)):
        mean = 100 * values.double().mean(0)
        results[name] = mean.tolist()
        results[f"{name}_error"] = (100 * values.double().std(0) / len(values) ** 0.5).tolist()
        results[f"{name}_geometric"] = _geometric(mean)
        resampled = [_geometric(100 * values.double()[rows].mean(0)) for rows in places]
        results[f"{name}_geometric_error"] = float(torch.tensor(resampled).std())
    return results


def _geometric(means: Tensor) -> float:
    return float(means.clamp(min=0).prod() ** (1 / MAX_NGRAM))


@torch.no_grad()
def hidden_states(model: Any, texts: Tensor, batch_size: int) -> Tensor:
    """Hidden state of the last chunk of each text: (P, CONTEXT) → (P, H)."""
    parts = []
    for ids in texts.split(batch_size):
        chunks = ids.unflatten(1, (-1, model.chunk_size))
        parts.append(model.backbone(model.embed(chunks))[:, -1])
    return torch.cat(parts)


@torch.no_grad()
def calm_samples(
    model: Any, hidden: Tensor, params: SamplingParams, draws: int, batch_size: int
) -> tuple[Tensor, dict[str, float]]:
    """Chunks sampled `draws` times at each position (S, P, 4), and what one costs."""
    prepare_inference(model)
    samples, costs = [], []
    for draw in range(draws):
        parts = []
        for first in range(0, len(hidden), batch_size):
            rows = hidden[first : first + batch_size]
            noise = RowNoise([torch_seed(draw, SeedStream.TRADEOFF, first + row) for row in range(len(rows))])
            output = sample_chunks(model.head, rows, [params] * len(rows), noise)
            parts.append(output.chunks)
            costs.append([float(part.float().mean()) for part in output.stats])
        samples.append(torch.cat(parts))
    means = torch.tensor(costs).mean(0).tolist()
    return torch.stack(samples), dict(zip(("draws", "fallbacks", "unsettled"), means, strict=True))


@torch.no_grad()
def transformer_samples(model: Any, texts: Tensor, temperature: float, draws: int, batch_size: int) -> Tensor:
    """Four tokens sampled `draws` times after each text: (S, P, 4)."""
    processor, parts = LogitsProcessor(temperature), []
    generator = torch.Generator().manual_seed(0)
    for ids in texts.split(batch_size):
        cache = model.backbone.new_cache()
        hidden = model.backbone(model.embed(ids[..., None]), cache=cache)[:, -1]
        rows = torch.arange(len(ids)).repeat_interleave(draws)
        cache.select(rows)
        hidden, chosen = hidden[rows], []
        while True:
            log_probs = model.head.propose(hidden, 1).log_probs(rows.new_empty(len(rows), 0))[0]
            chosen.append(torch.multinomial(processor(log_probs), 1, generator=generator))
            if len(chosen) == MAX_NGRAM:
                break
            hidden = model.backbone(model.embed(chosen[-1][..., None]), cache=cache)[:, -1]
        parts.append(torch.cat(chosen, dim=1).unflatten(0, (-1, draws)))
    return torch.cat(parts).transpose(0, 1)
