"""Accuracy and diversity of sampling methods on one trained CALM model, beside a Transformer's softmax temperatures.

    python benchmarks/temperature.py runs/laptop-calm/model --transformer runs/laptop-transformer/model --data DIR

As in the paper's last two figures: accuracy P(y) and collision Σ P(x)², each estimated from several choices at every
position of a text that was not trained on, all on the true text before it. K must be 4.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor
from transformers import DynamicCache

from calm.data.loader import mix
from calm.data.shards import PreparedData
from calm.models.loading import load_calm, load_softmax
from calm.noise import RowNoise
from calm.sampling.mixture import Cut
from calm.sampling.next_chunk import Sampling, next_chunks
from calm.sampling.vocabulary import search_of
from calm.scores.brier import LONGEST, accuracy_and_collision

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CONTEXT = 128  # tokens before a position


def windows(data: Path, positions: int) -> tuple[Tensor, Tensor]:
    """Texts (P, CONTEXT) and the four tokens behind each, from the validation split."""
    stream = PreparedData(data).split("validation")
    starts = torch.linspace(0, len(stream) - CONTEXT - LONGEST - 1, positions).long()
    rows = torch.stack([torch.tensor(stream[int(s) : int(s) + CONTEXT + LONGEST].astype("int64")) for s in starts])
    return rows[:, :CONTEXT], rows[:, CONTEXT:]


def measure(samples: Tensor, targets: Tensor) -> dict[str, Any]:
    """Samples (S, P, 4) → accuracy and collision of 1- to 4-grams in percent, with standard errors over positions."""
    accuracy, collision = accuracy_and_collision(samples, targets)  # (P, 4) each
    found: dict[str, Any] = {}
    for name, values in (("accuracy", accuracy), ("collision", collision)):
        mean = 100 * values.double().mean(0)
        found[name] = mean.tolist()
        found[f"{name}_error"] = (100 * values.double().std(0) / len(values) ** 0.5).tolist()
        found[f"{name}_geometric"] = float(mean.clamp(min=0).prod() ** (1 / LONGEST))
    return found


@torch.no_grad()
def calm_samples(model: Any, hidden: Tensor, sampling: Sampling, draws: int, batch: int) -> tuple[Tensor, dict]:
    """Chunks chosen `draws` times at each position (S, P, 4), and what one cost."""
    search, samples, cost = search_of(model.autoencoder), [], []
    for draw in range(draws):
        parts = []
        for first in range(0, len(hidden), batch):
            rows = hidden[first : first + batch]
            noise = RowNoise([int(mix(draw, 1, first + row) >> 1) for row in range(len(rows))])
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


def settings(candidates: list[int]) -> list[tuple[str, str, Sampling]]:
    """(curve, point, how)."""
    largest = max(candidates)
    found = [("T = 1", "", Sampling())]
    for method in ("batch", "token"):
        found += [(f"{method}, T = 1/3, N", str(n), Sampling(1 / 3, n, method)) for n in candidates if n > 1]
        found += [
            (f"{method}, N = {largest}, 1/T", str(s), Sampling(1 / s, largest, method)) for s in (1.25, 1.5, 2, 4, 6)
        ]
    few = min(64, largest)
    found += [(f"mixture, N = {few}, T", str(t), Sampling(t, few, "mixture")) for t in (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)]
    refilled = Sampling(1 / 3, min(200, largest), "token", refill=True)
    found += [("token, T = 1/3, N, refilled", str(refilled.num_candidates), refilled)]
    found += [("noise scaled by", str(t), Sampling(t, method="noise")) for t in (0.5, 0.1, 0.03, 0.01)]
    return found


def plot(found: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.5))
    curves = list(dict.fromkeys(point["curve"] for point in found))
    for axis, (title, pick) in zip(
        axes,
        {
            "first token": lambda p, name: p[name][0],
            "geometric mean over 1- to 4-grams": lambda p, name: p[f"{name}_geometric"],
        }.items(),
        strict=True,
    ):
        for number, curve in enumerate(curves):
            points = [p for p in found if p["curve"] == curve]
            axis.plot(
                [pick(p, "collision") for p in points],
                [pick(p, "accuracy") for p in points],
                "o-" if len(points) > 1 else "*",
                color=f"C{number}" if number < 10 else "black",
                label=curve,
                markersize=4 if len(points) > 1 else 12,
            )
        axis.set(xlabel="collision, percent (less is more diverse)", ylabel="accuracy, percent", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--transformer", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--positions", type=int, default=400)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 10, 20, 50, 100, 200])
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("temperature"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    texts, targets = windows(options.data, options.positions)
    found: list[dict[str, Any]] = []

    def tell(curve: str, point: str, samples: Tensor, **more: Any) -> None:
        found.append({"curve": curve, "point": point, **measure(samples, targets), **more})
        shown = {key: [round(v, 2) for v in found[-1][key]] for key in ("accuracy", "collision")}
        print(f"{curve} {point}: {shown} {more}", flush=True)

    model: Any = load_calm(options.model).eval()
    assert model.config.chunk_size == LONGEST
    with torch.no_grad():
        hidden = torch.cat([model.hidden_states(part)[:, -1] for part in texts.split(options.batch)])
    for curve, point, sampling in settings(options.candidates):
        samples, cost = calm_samples(model, hidden, sampling, options.draws, options.batch)
        tell(curve, point, samples, **cost)
    if options.transformer is not None:
        baseline: Any = load_softmax(options.transformer).eval()
        for temperature in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
            samples = softmax_samples(baseline, texts, temperature, 2 * options.draws, options.batch)
            tell("Transformer, T", str(temperature), samples)
    options.output.with_suffix(".json").write_text(json.dumps(found, indent=1))
    plot(found, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
