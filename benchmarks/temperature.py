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

from calm.evaluate.tradeoff import calm_samples, measure, softmax_samples, windows
from calm.models.loading import load_calm, load_softmax
from calm.sampling.next_chunk import Sampling
from calm.scores.brier import LONGEST

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def settings(candidates: list[int], chain: bool) -> list[tuple[str, str, Sampling]]:
    """(curve, point, how); a chain needs no candidates for its mixture, and has no noise to scale."""
    largest = max(candidates)
    found = [("T = 1", "", Sampling())]
    for method in ("batch", "token"):
        found += [(f"{method}, T = 1/3, N", str(n), Sampling(1 / 3, n, method)) for n in candidates if n > 1]
        found += [
            (f"{method}, N = {largest}, 1/T", str(s), Sampling(1 / s, largest, method)) for s in (1.25, 1.5, 2, 4, 6)
        ]
    few = min(64, largest)
    mixture = "mixture, T" if chain else f"mixture, N = {few}, T"
    found += [(mixture, str(t), Sampling(t, few, "mixture")) for t in (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)]
    refilled = Sampling(1 / 3, min(200, largest), "token", refill=True)
    found += [("token, T = 1/3, N, refilled", str(refilled.num_candidates), refilled)]
    if not chain:
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
    for curve, point, sampling in settings(options.candidates, model.config.is_chain):
        samples, cost = calm_samples(model, hidden, sampling.of(model.config), options.draws, options.batch)
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
