"""Does BrierLM rank models as cross-entropy does?

    python benchmarks/brier_correlation.py softmax MODEL... --data DIR --output DIR     trained Transformers
    python benchmarks/brier_correlation.py toy --output DIR                             CALM models of a toy language

The toy language is a second-order Markov chain over four tokens. With K = 4 there are only 256 different chunks, so the
probability that a CALM model assigns to each can be estimated as its frequency among many samples. This gives the
model's cross-entropy under the true distribution, which training never uses.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from calm.autoencoder import Autoencoder, AutoencoderConfig
from calm.distributed import World
from calm.evaluate.brier_lm import BrierLM
from calm.evaluate.estimators import SampleEstimator
from calm.evaluate.language_models import Options, evaluate_language_models
from calm.files import write_json
from calm.llama import LlamaConfig
from calm.model import Calm, PlainCalmConfig
from calm.noise import RowNoise

VOCAB_SIZE, K, LENGTH = 4, 4, 64
NUM_CHUNKS = VOCAB_SIZE**K
STEPS = (0, 25, 50, 100, 200, 400, 800, 1600, 3200)
SAMPLES = 20_000  # of the next chunk per position
SAMPLES_AT_ONCE = 1000
AUTOENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "chunk_size": K,
    "latent_size": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "token_dropout": 0.0,
}
MODELS = {  # width, layers, N, learning rate
    "32 wide, N = 4": (32, 1, 4, 3e-3),
    "64 wide, N = 8": (64, 2, 8, 2e-3),
    "64 wide, N = 2": (64, 2, 2, 2e-3),
}


def run_softmax(models: list[Path], data: Path, split: str, output: Path) -> None:
    world = World(0, 1, torch.device("cpu"))
    results = evaluate_language_models(models, data, split, Options(positions="own"), world)["models"]
    points = [
        {"series": data.name, "name": name, "cross_entropy": scores["cross_entropy"], "brier_lm": scores["brier_lm"]}
        for name, scores in results.items()
    ]
    report(points, "cross-entropy (nats per token)", output)


class Language:
    """A second-order Markov chain with random transition probabilities."""

    def __init__(self, seed: int = 0):
        generator = np.random.default_rng(seed)
        probabilities = generator.dirichlet(np.full(VOCAB_SIZE, 0.5), (VOCAB_SIZE, VOCAB_SIZE))
        self.transitions = torch.tensor(probabilities, dtype=torch.float32)

    def sample(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Token ids (rows, length)."""
        tokens = [torch.randint(VOCAB_SIZE, (rows,), generator=generator) for _ in range(2)]
        while len(tokens) < length:
            tokens.append(self.transitions[tokens[-2], tokens[-1]].multinomial(1, generator=generator)[:, 0])
        return torch.stack(tokens, dim=1)

    def next_chunk(self, before: Tensor) -> Tensor:
        """Probabilities of all chunks after two tokens: (n, 2) → (n, 256), the first token most significant."""
        first = self.transitions[before[:, 0], before[:, 1]]  # (n, first)
        probabilities = first[:, :, None] * self.transitions[before[:, 1]]  # (n, first, second)
        while probabilities.ndim < K + 1:
            probabilities = probabilities[..., None] * self.transitions  # each token depends on the two before it
        return probabilities.flatten(1)


def in_chunks(tokens: Tensor) -> Tensor:
    """(B, T) → (B, L, K)."""
    return tokens.unflatten(1, (-1, K))


def train_autoencoder() -> Autoencoder:
    torch.manual_seed(0)
    model = Autoencoder(AutoencoderConfig(**AUTOENCODER))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(400):
        tokens = torch.randint(VOCAB_SIZE, (32, LENGTH), generator=generator)
        model(in_chunks(tokens))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def measure(model: Calm, language: Language, num_samples: int) -> dict[str, Any]:
    """BrierLM on text of the language, and the cross-entropy of the next chunk under it, in nats per token."""
    model.eval()
    tokens = language.sample(256, LENGTH + 4, torch.Generator().manual_seed(2))
    accuracy, collision, _ = SampleEstimator(model, LENGTH, 8).estimate(tokens, RowNoise(list(range(len(tokens)))))
    brier = BrierLM()
    documents = torch.arange(len(tokens)).repeat_interleave(accuracy.shape[1])
    brier.add(documents, accuracy.flatten(0, 1), collision.flatten(0, 1))
    hidden = model.hidden_states(in_chunks(tokens[:64, : LENGTH // 2]))[:, -1]
    truth = language.next_chunk(tokens[:64, LENGTH // 2 - 2 : LENGTH // 2])
    place_values = VOCAB_SIZE ** torch.arange(K - 1, -1, -1)
    generator = torch.Generator().manual_seed(3)
    counts = torch.zeros(len(hidden), NUM_CHUNKS)
    for start in range(0, num_samples, SAMPLES_AT_ONCE):
        count = min(SAMPLES_AT_ONCE, num_samples - start)
        chunks = model.head.propose(hidden, count, generator).tokens()  # (N, 64, K)
        indices = (chunks * place_values).sum(-1)
        counts += torch.stack([row.bincount(minlength=NUM_CHUNKS) for row in indices.T])
    model.train()
    frequencies = (counts + 0.5) / (num_samples + NUM_CHUNKS / 2)  # smoothed: no chunk has probability 0
    cross_entropy = -(truth * frequencies.log()).sum(-1).mean().item() / K
    entropy = -torch.special.xlogy(truth, truth).sum(-1).mean().item() / K
    return {"cross_entropy": cross_entropy, "entropy": entropy, "brier_lm": vars(brier.compute()["brier_lm"])}


def make_model(autoencoder: Autoencoder, width: int, layers: int, num_samples: int) -> Calm:
    torch.manual_seed(0)
    backbone = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
    )
    model = Calm(PlainCalmConfig(backbone, autoencoder.config, num_model_samples=num_samples))
    model.load_autoencoder(autoencoder)
    return model


def run_toy(output: Path, max_steps: int, num_samples: int) -> None:
    language = Language()
    autoencoder = train_autoencoder()
    points = []
    measured = [step for step in STEPS if step <= max_steps]
    for series, (width, layers, num_model_samples, rate) in MODELS.items():
        model = make_model(autoencoder, width, layers, num_model_samples)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
        generator = torch.Generator().manual_seed(4)
        for step in range(measured[-1] + 1):
            if step in measured:
                points.append({"series": series, "name": f"step {step}", **measure(model, language, num_samples)})
                print(json.dumps(points[-1]), flush=True)
            model(in_chunks(language.sample(32, LENGTH, generator)))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    report(points, "cross-entropy of the next chunk (nats per token)", output)


def correlation(function: Any, x: Any, y: Any) -> float:
    return float(function(x, y).statistic)


def report(points: list[dict[str, Any]], label: str, output: Path) -> None:
    """Write correlation.json and correlation.png, for the points that have a BrierLM."""
    used = [point for point in points if point["brier_lm"]["value"]]
    if len(used) < 3:
        raise SystemExit(f"{len(used)} of {len(points)} models have a BrierLM: too few for a correlation")
    cross_entropies = [point["cross_entropy"] for point in used]
    scores = [point["brier_lm"]["value"] for point in used]
    result = {
        "points": points,
        "used": len(used),
        "pearson": correlation(pearsonr, cross_entropies, scores),
        "pearson_with_log": correlation(pearsonr, cross_entropies, np.log(scores)),
        "spearman": correlation(spearmanr, cross_entropies, scores),
    }
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "correlation.json", result)
    print(json.dumps({name: result[name] for name in ("used", "pearson", "pearson_with_log", "spearman")}))
    figure, axis = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for series in dict.fromkeys(point["series"] for point in used):
        own = [point for point in used if point["series"] == series]
        errors = [point["brier_lm"]["standard_error"] for point in own]
        x, y = ([point["cross_entropy"] for point in own], [point["brier_lm"]["value"] for point in own])
        axis.errorbar(x, y, yerr=errors, fmt="o-", capsize=3, label=series)
    if "entropy" in points[0]:
        axis.axvline(points[0]["entropy"], color="grey", linestyle=":", label="entropy of the language")
    axis.set_xlabel(label)
    axis.set_ylabel("BrierLM (percent) ± standard error")
    axis.set_title(f"Pearson {result['pearson']:.3f}, Spearman {result['spearman']:.3f}")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(output / "correlation.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("softmax", "toy"))
    parser.add_argument("models", nargs="*", type=Path, help="model directories, for softmax")
    parser.add_argument("--data", type=Path, help="prepared data, for softmax")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--steps", type=int, default=STEPS[-1], help="maximum number of training steps, for toy")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of the next chunk per position, for toy")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.what == "softmax" and not (args.models and args.data):
        parser.error("softmax needs models and --data")
    if args.what == "toy":
        run_toy(args.output, args.steps, args.samples)
    else:
        run_softmax(args.models, args.data, args.split, args.output)


if __name__ == "__main__":
    main()
