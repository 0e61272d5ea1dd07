"""Does BrierLM rank models like cross-entropy does?

    python benchmarks/brier_correlation.py softmax MODEL... --data DIR --output DIR     models with a softmax
    python benchmarks/brier_correlation.py toy --output DIR                             energy-trained models

The toy language is a Markov chain of second order over four tokens. A chunk of K = 4 has 256 values, so the
probability that a CALM model gives to each is the share of it among many samples, and with it the model's cross-entropy
under the language itself: a number that training never saw.
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

from calm.distributed import World
from calm.evaluate.brier_lm import BrierLM
from calm.evaluate.estimators import CalmEstimator
from calm.evaluate.language_models import Options, evaluate_language_models
from calm.files import write_json
from calm.models.autoencoder import ChunkAutoencoder
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import CalmConfig, ChunkAutoencoderConfig
from calm.noise import RowNoise

WORDS, K, LENGTH = 4, 4, 64
CHUNKS = WORDS**K
STEPS = (0, 25, 50, 100, 200, 400, 800, 1600, 3200)
SAMPLES = 20_000  # of the next chunk at a position
LANGUAGE_MODELS = {  # energy-trained models that differ in size, samples and speed of learning
    "32 wide, N = 4": ({"hidden_size": 32, "num_hidden_layers": 1}, 4, 3e-3),
    "64 wide, N = 8": ({"hidden_size": 64, "num_hidden_layers": 2}, 8, 2e-3),
    "64 wide, N = 2": ({"hidden_size": 64, "num_hidden_layers": 2}, 2, 2e-3),
}


def softmax(models: list[Path], data: Path, split: str, output: Path) -> None:
    world = World(0, 1, torch.device("cpu"))
    answer = evaluate_language_models(models, data, split, Options(positions="own"), world)
    points = [
        {"series": data.name, "name": name, "cross_entropy": found["cross_entropy"], "brier_lm": found["brier_lm"]}
        for name, found in answer["models"].items()
    ]
    conclude(points, "cross-entropy (nats a token)", output)


class Language:
    """A Markov chain of second order with random transitions."""

    def __init__(self, seed: int = 0):
        generator = np.random.default_rng(seed)
        self.transitions = torch.tensor(generator.dirichlet(np.full(WORDS, 0.5), (WORDS, WORDS)), dtype=torch.float32)

    def texts(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        tokens = [torch.randint(WORDS, (rows,), generator=generator) for _ in range(2)]
        while len(tokens) < length:
            tokens.append(self.transitions[tokens[-2], tokens[-1]].multinomial(1, generator=generator)[:, 0])
        return torch.stack(tokens, dim=1)

    def next_chunk(self, before: Tensor) -> Tensor:
        """Probabilities of all chunks behind two tokens: (n, 2) → (n, 256), the first token counting most."""
        first = self.transitions[before[:, 0], before[:, 1]]  # (n, first)
        found = first[:, :, None] * self.transitions[before[:, 1]]  # (n, first, second)
        while found.ndim < K + 1:
            found = found[..., None] * self.transitions  # the third depends on first and second, and so on
        return found.flatten(1)


def train_autoencoder(language: Language) -> ChunkAutoencoder:
    torch.manual_seed(0)
    config = ChunkAutoencoderConfig(
        vocab_size=WORDS, chunk_size=K, latent_size=16, hidden_size=64, intermediate_size=128, token_dropout=0.0
    )
    model = ChunkAutoencoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(400):
        tokens = torch.randint(WORDS, (32, LENGTH), generator=generator)
        model(tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def measure(model: CalmForCausalLM, language: Language) -> dict[str, Any]:
    """BrierLM on texts of the language, and the cross-entropy of the next chunk under it, in nats a token."""
    model.eval()
    texts = language.texts(256, LENGTH + 4, torch.Generator().manual_seed(2))
    accuracy, collision, _ = CalmEstimator(model, LENGTH, 8).estimate(texts, RowNoise(list(range(len(texts)))))
    brier = BrierLM()
    documents = torch.arange(len(texts)).repeat_interleave(accuracy.shape[1])
    brier.add(documents, accuracy.flatten(0, 1), collision.flatten(0, 1))
    hidden = model.hidden_states(texts[:64, : LENGTH // 2])[:, -1]
    truth = language.next_chunk(texts[:64, LENGTH // 2 - 2 : LENGTH // 2])
    places = WORDS ** torch.arange(K - 1, -1, -1)
    generator = torch.Generator().manual_seed(3)
    counts = torch.zeros(len(hidden), CHUNKS)
    for _ in range(20):
        chunks = model.draw(hidden, SAMPLES // 20, generator)  # (N, 64, K)
        numbers = (chunks * places).sum(-1)
        counts += torch.stack([row.bincount(minlength=CHUNKS) for row in numbers.T])
    model.train()
    shares = (counts + 0.5) / (SAMPLES + CHUNKS / 2)  # a chunk that was never drawn is not impossible
    nats = -(truth * shares.log()).sum(-1).mean().item() / K
    entropy = -torch.special.xlogy(truth, truth).sum(-1).mean().item() / K
    score = brier.compute()["brier_lm"]
    return {"cross_entropy": nats, "entropy": entropy, "brier_lm": vars(score)}


def toy(output: Path) -> None:
    language = Language()
    autoencoder = train_autoencoder(language)
    points = []
    for series, (shape, samples, rate) in LANGUAGE_MODELS.items():
        torch.manual_seed(0)
        backbone = {**shape, "intermediate_size": 2 * shape["hidden_size"], "num_attention_heads": 2}
        config = CalmConfig(backbone, autoencoder.config, num_model_samples=samples)
        model = CalmForCausalLM(config)
        model.autoencoder.load_state_dict(autoencoder.state_dict())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
        generator = torch.Generator().manual_seed(4)
        for step in range(STEPS[-1] + 1):
            if step in STEPS:
                points.append({"series": series, "name": f"step {step}", **measure(model, language)})
                print(json.dumps(points[-1]), flush=True)
            tokens = language.texts(32, LENGTH, generator)
            loss: Any = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    conclude(points, "cross-entropy of the next chunk (nats a token)", output)


def correlation(kind: Any, x: Any, y: Any) -> float:
    return float(kind(x, y).statistic)


def conclude(points: list[dict[str, Any]], label: str, output: Path) -> None:
    """Correlations over the points that have a BrierLM, a JSON and a plot."""
    known = [point for point in points if point["brier_lm"]["value"]]
    if len(known) < 3:
        raise SystemExit(f"{len(known)} of {len(points)} models have a BrierLM: too few for a correlation")
    nats = [point["cross_entropy"] for point in known]
    scores = [point["brier_lm"]["value"] for point in known]
    answer = {
        "points": points,
        "used": len(known),
        "pearson": correlation(pearsonr, nats, scores),
        "pearson_with_log": correlation(pearsonr, nats, np.log(scores)),
        "spearman": correlation(spearmanr, nats, scores),
    }
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "correlation.json", answer)
    print(json.dumps({name: answer[name] for name in ("used", "pearson", "pearson_with_log", "spearman")}))
    figure, axis = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for series in dict.fromkeys(point["series"] for point in known):
        mine = [point for point in known if point["series"] == series]
        errors = [point["brier_lm"]["standard_error"] for point in mine]
        x, y = ([point["cross_entropy"] for point in mine], [point["brier_lm"]["value"] for point in mine])
        axis.errorbar(x, y, yerr=errors, fmt="o-", capsize=3, label=series)
    if "entropy" in points[0]:
        axis.axvline(points[0]["entropy"], color="grey", linestyle=":", label="entropy of the language")
    axis.set_xlabel(label)
    axis.set_ylabel("BrierLM (percent) ± standard error")
    axis.set_title(f"Pearson {answer['pearson']:.3f}, Spearman {answer['spearman']:.3f}")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(output / "correlation.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("softmax", "toy"))
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.what == "softmax" and not (options.models and options.data):
        parser.error("softmax needs models and --data")
    if options.what == "toy":
        toy(options.output)
    else:
        softmax(options.models, options.data, options.split, options.output)


if __name__ == "__main__":
    main()
