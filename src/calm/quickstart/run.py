"""The stages of a quickstart. Completed stages are kept, so that an interrupted quickstart can be resumed."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calm.checkpoint import load_calm, load_transformer
from calm.config import RunConfig
from calm.data.prepare import prepare
from calm.data.shards import PreparedData
from calm.distributed import World, process_group
from calm.errors import UserError
from calm.evaluate.language_models import Options, evaluate_language_models
from calm.evaluate.reconstruction import evaluate_autoencoder
from calm.evaluate.tradeoff import CONTEXT, calm_samples, hidden_states, measure, transformer_samples, windows
from calm.files import locked_directory, write_atomic, write_json
from calm.generate.sampler import SamplingParams
from calm.generate.text import TextGenerator
from calm.paper.cost import cost_of
from calm.quickstart.plan import PLAN, STAGES, Plan, model_of, save_or_check_plan
from calm.quickstart.report import make_report
from calm.screen import Screen
from calm.train.loop import TrainingStopped, train

TITLES = {
    "autoencoder": "autoencoder: 4 tokens ↔ one vector",
    "calm": "CALM language model: 4 tokens per step",
    "transformer": "Transformer baseline, same training time",
}
REPORT = "report.html"
MIN_SPLIT_TOKENS = 1_000
SAMPLES = 4  # per position of the test text, with a context as long as a training sequence
SCORED_TOKENS_PER_MINUTE, MIN_SCORED_TOKENS = 4_000, 4_000
MAX_POSITIONS, DRAWS, BATCH_SIZE = 300, 4, 50  # accuracy-diversity trade-off: positions, draws, batch size
TEMPERATURES = (1.0, 0.8, 0.6, 0.5, 0.4)
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 16, 96


def quickstart(plan: Plan, output: Path, screen: Screen) -> dict[str, Any]:
    """Run all stages that are not complete yet, and write the report. Returns its results."""
    with locked_directory(output, "calm quickstart"):
        save_or_check_plan(plan, output)
        total = len(STAGES) + 3
        screen.stage(1, total, "text → tokenizer and shards", _minutes(0.3))
        _prepare(plan, output, screen)
        for number, stage in enumerate(STAGES, start=2):
            config = plan.run(stage, output)
            note = f"{config.train.steps:,} steps, {_minutes(plan.minutes_of(stage))}"
            screen.stage(number, total, TITLES[stage], note)
            if not (model_of(output, stage) / "config.json").exists():
                _train(config, output / "runs" / stage, screen)
        screen.stage(total - 1, total, "BrierLM of both models on test text", _minutes(1.5))
        results = {"plan": json.loads((output / PLAN).read_bytes())}
        with process_group() as world, screen.evaluation() as report:
            results["scores"] = _cached(output, "scores", lambda: _scores(plan, output, world, report))
        screen.stage(total, total, "temperatures, samples, report", _minutes(1))
        results["reconstruction"] = _cached(output, "reconstruction", lambda: _reconstruction(plan, output))
        results["tradeoff"] = _cached(output, "tradeoff", lambda: _tradeoff(plan, output))
        results["samples"] = _cached(output, "samples", lambda: _samples(output, plan.seed))
        results["costs"] = _costs(plan, output)
        write_atomic(output / REPORT, make_report(results, output).encode())
        return results


def _train(config: RunConfig, output: Path, screen: Screen) -> None:
    try:
        with screen.training(config.train.steps) as report:
            train(config, output, resume=True, report=report, warn=screen.warn)
    except TrainingStopped as stopped:
        raise TrainingStopped("stopped; repeat the command to continue", stopped.signum) from stopped


def _prepare(plan: Plan, output: Path, screen: Screen) -> None:
    with screen.preparation() as report:
        manifest = prepare(
            list(plan.data), output / "data", plan.preparation, resume=True, report=report, warn=screen.warn
        )
    for name, split in manifest["splits"].items():
        if split["tokens"] < MIN_SPLIT_TOKENS:
            raise UserError(
                f"the {name} split has {split['tokens']:,} tokens, but at least {MIN_SPLIT_TOKENS:,} are needed; "
                "provide more text or more documents"
            )


def _cached(output: Path, name: str, compute: Callable[[], Any]) -> Any:
    """Load a result from its file, or compute and save it."""
    path = output / "results" / f"{name}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_json(path, compute())
    return json.loads(path.read_bytes())


def _minutes(minutes: float) -> str:
    return f"about {minutes:.0f} min" if minutes >= 1.5 else f"about {max(1, round(60 * minutes))} s"


def _reconstruction(plan: Plan, output: Path) -> dict[str, Any]:
    metrics = evaluate_autoencoder(model_of(output, "autoencoder"), output / "data", "test")
    return {**metrics, "training_steps": plan.steps("autoencoder")}


def _scores(plan: Plan, output: Path, world: World, report: Any) -> dict[str, Any]:
    """BrierLM of both models on the test split, which was used neither for training nor for tuning."""
    models = [model_of(output, stage) for stage in ("calm", "transformer")]
    max_tokens = max(MIN_SCORED_TOKENS, round(plan.minutes * SCORED_TOKENS_PER_MINUTE))
    options = Options(SAMPLES, context=CONTEXT, most_tokens=max_tokens)
    return evaluate_language_models(models, output / "data", "test", options, world, report)


@torch.no_grad()
def _tradeoff(plan: Plan, output: Path) -> list[dict[str, Any]]:
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


def _samples(output: Path, seed: int) -> list[dict[str, Any]]:
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


def _costs(plan: Plan, output: Path) -> list[dict[str, Any]]:
    """Parameters and FLOPs of each model, with a context as long as a training sequence."""
    results = []
    for stage in STAGES:
        config = plan.run(stage, output)
        steps = config.data.sequence_length // config.data.chunk_size
        results.append(cost_of(stage, config, context=steps).as_json())
    return results
