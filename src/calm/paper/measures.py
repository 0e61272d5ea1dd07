"""Measures of a run: scores on held-out text, reconstruction accuracy, the accuracy-diversity trade-off, step time, or
estimated cost. Results are JSON-serializable and are stored in results.json.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calm.checkpoint import load_calm, load_transformer
from calm.config import RunConfig
from calm.distributed import World
from calm.evaluate.language_models import Options, evaluate_language_models
from calm.evaluate.reconstruction import evaluate_autoencoder
from calm.evaluate.tradeoff import calm_samples, hidden_states, measure, transformer_samples, windows
from calm.generate.sampler import SamplingParams
from calm.paper.cost import cost_of
from calm.paper.scales import Run, Scale, digest
from calm.train.optimizer import adamw
from calm.train.stages import STAGES

DRAWS, BATCH_SIZE = 4, 50  # samples per position, and batch size, of the accuracy-diversity trade-off
TIMED_STEPS = 8


@dataclass(frozen=True)
class Measure:
    """A quantity to measure of a run."""

    kind: str  # a key of EVALUATE
    run: Run
    options: tuple[tuple[str, Any], ...] = ()

    def key(self, data_digest: str) -> str:
        return digest([self.kind, self.run.key(data_digest), sorted(self.options)])

    def with_seed(self, seed: int) -> "Measure":
        return Measure(self.kind, self.run.with_seed(seed), self.options)

    @property
    def is_seeded(self) -> bool:
        """Whether it is measured for every seed of a scale."""
        return self.kind == "scores"

    @property
    def runs(self) -> list[Run]:
        """Runs to train before measuring, in this order."""
        autoencoder = [self.run.autoencoder] if self.run.autoencoder is not None else []
        return {"cost": [], "step-time": autoencoder}.get(self.kind, [*autoencoder, self.run])


@dataclass(frozen=True)
class Inputs:
    """What a measure is computed from."""

    config: RunConfig
    model: Path
    data: Path
    world: World
    report: Callable[[str, int, int | None], None]


def scores(run: Run, scale: Scale, *, stride: int | None = None, **changes: Any) -> Measure:
    """BrierLM with the sums of each document. `changes` override fields of config.json that affect sampling."""
    options = {
        "split": scale.split,
        "samples": scale.samples,
        "context": scale.context,
        "most_tokens": scale.most_tokens,
        "stride": stride or scale.chunk_size,
    }
    return Measure("scores", run, tuple({**options, **changes}.items()))


def reconstruction(run: Run, scale: Scale) -> Measure:
    return Measure("reconstruction", run, (("split", scale.split),))


def base_scores(scale: Scale, seed: int) -> Measure:
    """Scores of the base model with another seed."""
    return scores(scale.calm().with_seed(seed), scale)


def tradeoff(run: Run, scale: Scale, temperature: float, candidates: int | None = None) -> Measure:
    """Accuracy and collision: Algorithm 2 for a CALM model, the softmax for a Transformer."""
    options = {"split": scale.split, "positions": scale.positions, "temperature": temperature, "candidates": candidates}
    return Measure("tradeoff", run, tuple(options.items()))


def step_time(run: Run) -> Measure:
    return Measure("step-time", run)


def cost(run: Run, candidates: int = 1) -> Measure:
    return Measure("cost", run, (("candidates", candidates),))


def _scores(
    inputs: Inputs, split: str, samples: int, context: int | None, most_tokens: int | None, stride: int, **changes: Any
) -> dict[str, Any]:
    options = Options(samples, context=context, most_tokens=most_tokens, stride=stride, keep_sums=True)
    with tempfile.TemporaryDirectory() as folder:
        model = _with_config(inputs.model, changes, Path(folder)) if changes else inputs.model
        answer = evaluate_language_models([model], inputs.data, split, options, inputs.world, inputs.report)
    (model_scores,) = answer["models"].values()
    return {name: model_scores[name] for name in ("sums", "cross_entropy") if name in model_scores}


def _with_config(model: Path, changes: dict[str, Any], folder: Path) -> Path:
    """Create a copy of a model directory in `folder`, by symbolic links, with changed values in its config.json."""
    for path in model.resolve().iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def _reconstruction(inputs: Inputs, split: str) -> dict[str, Any]:
    metrics = evaluate_autoencoder(inputs.model, inputs.data, split)
    names = ("token_accuracy", "chunk_accuracy", "mean_sigma", "collapsed_dimensions", "latent_size", "tokens")
    return {name: metrics[name] for name in names}


@torch.no_grad()
def _tradeoff(inputs: Inputs, split: str, positions: int, temperature: float, candidates: int | None) -> dict[str, Any]:
    texts, targets = windows(inputs.data, positions, split)
    if inputs.config.stage == "transformer":
        model: Any = load_transformer(inputs.model)
        return measure(transformer_samples(model, texts, temperature, 2 * DRAWS, BATCH_SIZE), targets)
    model = load_calm(inputs.model)
    hidden = hidden_states(model, texts, BATCH_SIZE)
    params = SamplingParams(temperature, candidates, "batch") if candidates not in (None, 1) else SamplingParams()
    samples, costs = calm_samples(model, hidden, params.resolve(model.head), DRAWS, BATCH_SIZE)
    return measure(samples, targets) | costs


def _step_time(inputs: Inputs) -> dict[str, Any]:
    """Median CPU time of a training step. Unlike wall-clock time, it does not depend on other programs."""
    torch.manual_seed(inputs.config.seed)
    stage = STAGES[inputs.config.stage](inputs.config, inputs.world)
    stage.initialize()
    settings, model = inputs.config.optimizer, stage.model.train()
    optimizer = adamw(model, settings.betas, settings.eps, settings.weight_decay)
    seconds = []
    for step in range(TIMED_STEPS):
        batch, start = stage.read(step), time.process_time()
        for part in stage.micro_batches(batch):
            model(**part)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    return {"step_seconds": statistics.median(seconds[1:])}


def _cost(inputs: Inputs, candidates: int) -> dict[str, Any]:
    context = inputs.config.data.sequence_length // inputs.config.data.chunk_size
    costs = cost_of("", inputs.config, context, candidates)
    return {
        "parameters": costs.parameters,
        "train_flops": costs.train_flops,
        "inference_flops": costs.inference_flops_per_token,
        "inference_flops_with_candidates": costs.inference_flops_per_token_with_candidates,
        "inference_flops_with_search": costs.inference_flops_per_token_with_search,
    }


EVALUATE: dict[str, Callable[..., dict[str, Any]]] = {
    "scores": _scores,
    "reconstruction": _reconstruction,
    "tradeoff": _tradeoff,
    "step-time": _step_time,
    "cost": _cost,
}


def evaluate(measure: Measure, inputs: Inputs) -> dict[str, Any]:
    return EVALUATE[measure.kind](inputs, **dict(measure.options))
