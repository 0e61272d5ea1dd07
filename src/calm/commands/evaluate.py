"""`calm evaluate`: run an evaluation, save the results, print them."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from calm import console
from calm.distributed import process_group
from calm.errors import UserError
from calm.evaluate import language_models, plots, reconstruction
from calm.evaluate.language_models import Options
from calm.files import write_json


def evaluate_language_models(
    models: list[Path], data: Path, split: str, options: Options, output: Path | None, as_json: bool, device: str
) -> None:
    with process_group(device) as world, console.evaluation_progress() as progress:
        results = language_models.evaluate_language_models(models, data, split, options, world, progress)
    if not world.is_main:
        return
    for warning in results["warnings"]:
        console.warn(warning)
    _finish(results, console.scores_tables(results), output, "scores.json", as_json)
    if output is not None:
        plots.plot_scores(results, output / "scores.png")


def evaluate_autoencoder(
    model: Path, data: Path, split: str, batch_size: int, output: Path | None, as_json: bool, device: str, dtype: str
) -> None:
    _require_single_process("the evaluation of an autoencoder")
    with console.stderr.status("evaluating"):
        measures = reconstruction.evaluate_autoencoder(model, data, split, batch_size, device, dtype)
    curve = {f"token accuracy, extra noise {p['extra_noise']}": p["token_accuracy"] for p in measures["robustness"]}
    table = console.values_table(f"{model} on {data}", measures | curve)
    _finish(measures, [table], output, "reconstruction.json", as_json)
    if output is not None:
        plots.plot_robustness(measures, output / "robustness.png")


def run_harness(models: list[Path], tasks: list[str], output: Path | None, as_json: bool, **options: Any) -> None:
    """`options` are those of `calm.evaluate.harness.run_harness`."""
    if len(models) > 1:
        raise UserError(f"--harness takes one model, not {len(models)}; run it once for each model")
    _require_single_process("--harness")
    try:
        from calm.evaluate import harness
    except ModuleNotFoundError as error:
        raise UserError(f"--harness needs {error.name}; install it with: pip install 'calm-lm[eval]'") from error

    results = harness.run_harness(models[0], tasks, **options)
    if results["likelihood_bound"]:
        console.warn(
            f"likelihoods of a CALM model are bounds, estimated from {results['likelihood_bound']} latents per chunk: "
            "scores based on them are not exact"
        )
    tables = (console.values_table(name, task) for name, task in results["tasks"].items())
    _finish(results, tables, output, "harness.json", as_json)


def _require_single_process(what: str) -> None:
    if (world_size := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise UserError(f"{what} runs in one process, not in {world_size}; start it without torchrun")


def _finish(results: dict[str, Any], tables: Iterable[Table], output: Path | None, name: str, as_json: bool) -> None:
    """Save results as a JSON file in the output directory, if there is one, and print them."""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / name, results)
    console.print_results(results, tables, as_json)
