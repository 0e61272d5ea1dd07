"""Measurements of the trained quickstart models. All results are JSON-serializable."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calm.checkpoint import load_calm, load_transformer
from calm.data.shards import PreparedData
from calm.distributed import World
from calm.evaluate.language_models import Options, evaluate_language_models
from calm.evaluate.reconstruction import evaluate_autoencoder
from calm.evaluate.tradeoff import CONTEXT, calm_samples, hidden_states, measure, transformer_samples, windows
from calm.generate.sampler import SamplingParams
from calm.generate.text import TextGenerator
from calm.paper.cost import cost_of
from calm.quickstart.plan import STAGES, Plan, model_of

SAMPLES = 4  # per position of the test text, with a context as long as a training sequence
TOKENS_PER_MINUTE, MIN_TOKENS = 4_000, 4_000  # test tokens to score
MAX_POSITIONS, DRAWS, BATCH_SIZE = 300, 4, 50  # accuracy-diversity trade-off: positions, draws, batch size
TEMPERATURES = (1.0, 0.8, 0.6, 0.5, 0.4)
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 16, 96


def reconstruction(plan: Plan, output: Path) -> dict[str, Any]:
    metrics = evaluate_autoencoder(model_of(output, "autoencoder"), output / "data", "test")
    return {**metrics, "training_steps": plan.steps("autoencoder")}


def scores(plan: Plan, output: Path, world: World, report: Any) -> dict[str, Any]:
    """BrierLM of both models on the test split, which was used neither for training nor for tuning."""
    models = [model_of(output, stage) for stage in ("calm", "transformer")]
    most = max(MIN_TOKENS, round(plan.minutes * TOKENS_PER_MINUTE))
    options = Options(SAMPLES, context=CONTEXT, most_tokens=most)
    return evaluate_language_models(models, output / "data", "test", options, world, report)


@torch.no_grad()
def tradeoff(plan: Plan, output: Path) -> list[dict[str, Any]]:
    """Accuracy and collision of both models at several temperatures."""
    positions = min(MAX_POSITIONS, max(BATCH_SIZE, round(plan.minutes * MAX_POSITIONS / 15)))
    texts, targets = windows(output / "data", positions, "test")
    model, baseline = load_calm(model_of(output, "calm")), load_transformer(model_of(output, "transformer"))
    hidden = hidden_states(model, texts, BATCH_SIZE)
    points = []
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature).resolve(model.head)
        chunks, _ = calm_samples(model, hidden, params, DRAWS, BATCH_SIZE)
        points.append({"model": "calm", "temperature": temperature, **measure(chunks, targets)})
        chunks = transformer_samples(baseline, texts, temperature, DRAWS, BATCH_SIZE)
        points.append({"model": "transformer", "temperature": temperature, **measure(chunks, targets)})
    return points


def samples(output: Path, seed: int) -> list[dict[str, Any]]:
    """Continuations of the beginnings of test documents by both models, without selection."""
    data = PreparedData(output / "data", verify=False)
    prompts = _beginnings(data)
    generators = {stage: TextGenerator(model_of(output, stage)) for stage in ("calm", "transformer")}
    results = []
    for temperature in (1.0, 0.5):
        texts, seconds = {}, {}
        for stage, generator in generators.items():
            start = time.perf_counter()
            chunks: list[list[str]] = [[] for _ in prompts]
            for delta in generator.stream(prompts, SamplingParams(temperature), max_new_tokens=NEW_TOKENS, seed=seed):
                chunks[delta.index].append(delta.text)
            texts[stage], seconds[stage] = chunks, time.perf_counter() - start
        for number, prompt in enumerate(prompts):
            results.append(
                {
                    "prompt": data.tokenizer.decode(prompt),
                    "temperature": temperature,
                    "calm": texts["calm"][number],
                    "transformer": "".join(texts["transformer"][number]),
                    "seconds": round(seconds["calm"], 2),
                }
            )
    return results


def _beginnings(data: PreparedData) -> list[list[int]]:
    """The first tokens of the first documents that are longer than a prompt."""
    stream = data.split("test")
    lengths = np.concatenate(stream.lengths).astype(np.int64)
    starts = lengths.cumsum() - lengths
    long = (lengths > min(PROMPT_TOKENS, lengths.max() - 1)).nonzero()[0][:PROMPTS]
    return [stream[int(starts[d]) : int(starts[d] + min(PROMPT_TOKENS, lengths[d] - 1))].tolist() for d in long]


def costs(plan: Plan, output: Path) -> list[dict[str, Any]]:
    """Parameters and FLOPs of each model, with a context as long as a training sequence."""
    results = []
    for stage in STAGES:
        config = plan.run(stage, output)
        steps = config.data.sequence_length // config.data.chunk_size
        results.append(cost_of(stage, config, context=steps).as_json())
    return results
