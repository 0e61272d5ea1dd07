"""Measurements of the trained quickstart models. All results are JSON-serializable."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calm.data.shards import PreparedData
from calm.distributed import World
from calm.evaluate.language_models import Options, evaluate_language_models
from calm.evaluate.report import evaluate_autoencoder
from calm.evaluate.tradeoff import CONTEXT, calm_samples, measure, softmax_samples, windows
from calm.models.loading import load_calm, load_softmax
from calm.paper.cost import cost_of
from calm.quickstart.plan import STAGES, Plan, model_of
from calm.sampling.next_chunk import Sampling
from calm.sampling.text import Writer

SAMPLES = 4  # per position of the test text, with a context as long as a training sequence
TOKENS_PER_MINUTE, MIN_TOKENS = 4_000, 4_000  # test tokens to score
MAX_POSITIONS, DRAWS, TOGETHER = 300, 4, 50  # accuracy-diversity trade-off: positions, draws, batch size
TEMPERATURES = (1.0, 0.8, 0.6, 0.5, 0.4)
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 16, 96


def reconstruction(plan: Plan, output: Path) -> dict[str, Any]:
    found = evaluate_autoencoder(model_of(output, "autoencoder"), output / "data", "test")
    return {**found, "training_steps": plan.steps("autoencoder")}


def scores(plan: Plan, output: Path, world: World, report: Any) -> dict[str, Any]:
    """BrierLM of both models on the test split, which was used neither for training nor for tuning."""
    models = [model_of(output, stage) for stage in ("calm", "transformer")]
    most = max(MIN_TOKENS, round(plan.minutes * TOKENS_PER_MINUTE))
    options = Options(SAMPLES, context=CONTEXT, most_tokens=most)
    return evaluate_language_models(models, output / "data", "test", options, world, report)


@torch.no_grad()
def tradeoff(plan: Plan, output: Path) -> list[dict[str, Any]]:
    """Accuracy and collision of both models at several temperatures."""
    positions = min(MAX_POSITIONS, max(TOGETHER, round(plan.minutes * MAX_POSITIONS / 15)))
    texts, targets = windows(output / "data", positions, "test")
    model: Any = load_calm(model_of(output, "calm")).eval()
    baseline: Any = load_softmax(model_of(output, "transformer")).eval()
    hidden = torch.cat([model.hidden_states(part)[:, -1] for part in texts.split(TOGETHER)])
    found = []
    for temperature in TEMPERATURES:
        sampling = Sampling(temperature).of(model.config)
        chunks, _ = calm_samples(model, hidden, sampling, DRAWS, TOGETHER)
        found.append({"model": "calm", "temperature": temperature, **measure(chunks, targets)})
        chunks = softmax_samples(baseline, texts, temperature, DRAWS, TOGETHER)
        found.append({"model": "transformer", "temperature": temperature, **measure(chunks, targets)})
    return found


@torch.no_grad()
def samples(output: Path, seed: int) -> list[dict[str, Any]]:
    """Continuations of the beginnings of test documents by both models, without selection."""
    data = PreparedData(output / "data", verify=False)
    prompts = _beginnings(data)
    writer = Writer(model_of(output, "calm"))
    baseline: Any = load_softmax(model_of(output, "transformer")).eval()
    found = []
    for temperature in (1.0, 0.5):
        began = time.perf_counter()
        pieces: list[list[str]] = [[] for _ in prompts]
        for piece in writer.write(prompts, Sampling(temperature), max_new_tokens=NEW_TOKENS, seed=seed):
            pieces[piece.number].append(piece.text)
        seconds = time.perf_counter() - began
        torch.manual_seed(seed)
        for number, prompt in enumerate(prompts):
            ids = baseline.generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW_TOKENS,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                eos_token_id=data.tokenizer.eos_token_id,
                pad_token_id=data.tokenizer.pad_token_id,
            )[0, len(prompt) :].tolist()
            found.append(
                {
                    "prompt": data.tokenizer.decode(prompt),
                    "temperature": temperature,
                    "calm": pieces[number],
                    "transformer": data.tokenizer.decode([i for i in ids if i != data.tokenizer.eos_token_id]),
                    "seconds": round(seconds, 2),
                }
            )
    return found


def _beginnings(data: PreparedData) -> list[list[int]]:
    """The first tokens of the first documents that are longer than a prompt."""
    stream = data.split("test")
    lengths = np.concatenate(stream.lengths).astype(np.int64)
    starts = lengths.cumsum() - lengths
    long = (lengths > min(PROMPT_TOKENS, lengths.max() - 1)).nonzero()[0][:PROMPTS]
    return [stream[int(starts[d]) : int(starts[d] + min(PROMPT_TOKENS, lengths[d] - 1))].tolist() for d in long]


def costs(plan: Plan, output: Path) -> list[dict[str, Any]]:
    """Parameters and FLOPs of each model, with a context as long as a training sequence."""
    found = []
    for stage in STAGES:
        config = plan.run(stage, output)
        steps = config.data.sequence_length // config.data.chunk_size
        found.append(cost_of(stage, config, context=steps).as_json())
    return found
