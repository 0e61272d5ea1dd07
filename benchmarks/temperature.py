"""Accuracy and diversity of the sampling methods of a CALM model, compared with softmax temperatures of a Transformer.

    python benchmarks/temperature.py runs/laptop-calm/model --transformer runs/laptop-transformer/model --data DIR

As in the paper's last two figures: accuracy P(y) and collision Σ P(x)², each estimated from several samples at every
position of held-out text, given the true text before it. K must be 4. Writes a JSON file and a plot.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

from calm.checkpoint import load_calm, load_transformer
from calm.evaluate.tradeoff import calm_samples, hidden_states, measure, transformer_samples, windows
from calm.generate.sampler import SamplingParams
from calm.scores.brier import MAX_NGRAM

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TRANSFORMER_TEMPERATURES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


def sweeps(candidates: list[int], exact_likelihood: bool) -> list[tuple[str, str, SamplingParams]]:
    """Curve, point, and parameters.

    A model with token probabilities needs no candidates for its mixture, and has no noise to scale.
    """
    largest = max(candidates)
    points = [("T = 1", "", SamplingParams())]
    for method in ("batch", "token"):
        for n in candidates:
            if n > 1:
                points.append((f"{method}, T = 1/3, N", str(n), SamplingParams(1 / 3, n, method)))
        for s in (1.25, 1.5, 2, 4, 6):
            points.append((f"{method}, N = {largest}, 1/T", str(s), SamplingParams(1 / s, largest, method)))
    count = min(64, largest)
    mixture = "mixture, T" if exact_likelihood else f"mixture, N = {count}, T"
    points += [(mixture, str(t), SamplingParams(t, count, "mixture")) for t in (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)]
    refill = SamplingParams(1 / 3, min(200, largest), "token", refill=True)
    points += [("token with refill, T = 1/3, N", str(refill.num_candidates), refill)]
    if not exact_likelihood:
        points += [("noise scaled by", str(t), SamplingParams(t, method="noise")) for t in (0.5, 0.1, 0.03, 0.01)]
    return points


def plot(points: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.5))
    curves = list(dict.fromkeys(point["curve"] for point in points))
    panels = {
        "first token": lambda point, name: point[name][0],
        "geometric mean over 1- to 4-grams": lambda point, name: point[f"{name}_geometric"],
    }
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        for number, curve in enumerate(curves):
            own = [point for point in points if point["curve"] == curve]
            axis.plot(
                [value(point, "collision") for point in own],
                [value(point, "accuracy") for point in own],
                "o-" if len(own) > 1 else "*",
                color=f"C{number}" if number < 10 else "black",
                label=curve,
                markersize=4 if len(own) > 1 else 12,
            )
        axis.set(xlabel="collision, percent (less is more diverse)", ylabel="accuracy, percent", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a CALM model")
    parser.add_argument("--transformer", type=Path, help="directory of a Transformer")
    parser.add_argument("--data", type=Path, required=True, help="prepared data")
    parser.add_argument("--positions", type=int, default=400)
    parser.add_argument("--draws", type=int, default=4, help="samples per position")
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 10, 20, 50, 100, 200])
    parser.add_argument("--batch", type=int, default=50, help="positions computed at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("temperature"), help="path of the output without suffix")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts, targets = windows(args.data, args.positions)
    points: list[dict[str, Any]] = []

    def add(curve: str, point: str, samples: Tensor, **stats: Any) -> None:
        points.append({"curve": curve, "point": point, **measure(samples, targets), **stats})
        rounded = {key: [round(value, 2) for value in points[-1][key]] for key in ("accuracy", "collision")}
        print(f"{curve} {point}: {rounded} {stats}", flush=True)

    model = load_calm(args.model)
    if model.chunk_size != MAX_NGRAM:
        parser.error(f"the model has K = {model.chunk_size}; this benchmark needs K = {MAX_NGRAM}")
    hidden = hidden_states(model, texts, args.batch)
    for curve, point, params in sweeps(args.candidates, model.head.exact_likelihood):
        samples, stats = calm_samples(model, hidden, params.resolve(model.head), args.draws, args.batch)
        add(curve, point, samples, **stats)
    if args.transformer is not None:
        transformer = load_transformer(args.transformer)
        for temperature in TRANSFORMER_TEMPERATURES:
            samples = transformer_samples(transformer, texts, temperature, 2 * args.draws, args.batch)
            add("Transformer, T", str(temperature), samples)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(json.dumps(points, indent=1))
    plot(points, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
