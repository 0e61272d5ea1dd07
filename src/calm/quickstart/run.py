"""The stages of a quickstart. Completed stages are kept, so that an interrupted quickstart can be resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calm.config import RunConfig
from calm.data.prepare import prepare
from calm.distributed import process_group
from calm.errors import UserError
from calm.files import claimed, write_atomic, write_json
from calm.quickstart import measures
from calm.quickstart.plan import MIN_TOKENS, STAGES, Plan, keep_plan, model_of
from calm.quickstart.report import make_report
from calm.screen import Screen
from calm.train.loop import TrainingStopped, train

TITLES = {
    "autoencoder": "autoencoder: 4 tokens ↔ one vector",
    "calm": "CALM language model: 4 tokens per step",
    "transformer": "Transformer baseline, same training time",
}
REPORT = "report.html"


def quickstart(plan: Plan, output: Path, screen: Screen) -> dict[str, Any]:
    """Run all stages that are not complete yet, and write the report. Returns its results."""
    with claimed(output, "calm quickstart"):
        keep_plan(plan, output)
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
        results = {"plan": json.loads((output / "quickstart.json").read_bytes())}
        with process_group() as world, screen.evaluation() as report:
            results["scores"] = _cached(output, "scores", lambda: measures.scores(plan, output, world, report))
        screen.stage(total, total, "temperatures, samples, report", _minutes(1))
        results["reconstruction"] = _cached(output, "reconstruction", lambda: measures.reconstruction(plan, output))
        results["tradeoff"] = _cached(output, "tradeoff", lambda: measures.tradeoff(plan, output))
        results["samples"] = _cached(output, "samples", lambda: measures.samples(output, plan.seed))
        results["costs"] = measures.costs(plan, output)
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
        if split["tokens"] < MIN_TOKENS:
            raise UserError(
                f"the {name} split has {split['tokens']:,} tokens, but at least {MIN_TOKENS:,} are needed; provide "
                "more text or more documents"
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
