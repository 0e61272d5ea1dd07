"""What `calm evaluate` does: asks for measures, keeps them, shows them."""

import os
from contextlib import nullcontext
from pathlib import Path

from calm import console
from calm.distributed import process_group
from calm.errors import UserError
from calm.evaluate import language_models, report
from calm.evaluate.language_models import Options
from calm.files import write_json


def evaluate_language_models(
    models: list[Path], data: Path, split: str, options: Options, output: Path | None, as_json: bool
) -> None:
    with process_group() as world, console.evaluation_progress(world.is_main) as tell:
        answer = language_models.evaluate_language_models(models, data, split, options, world, tell)
    if not world.is_main:
        return
    for warning in answer["warnings"]:
        console.warn(warning)
    _keep(output, "scores.json", answer)
    if as_json:
        console.print_json(answer)
    else:
        for table in console.scores_tables(answer):
            console.stdout.print(table)
    if output is not None:
        report.plot_scores(answer, output / "scores.png")


def evaluate_autoencoder(
    model: Path, data: Path, split: str, batch_size: int, output: Path | None, as_json: bool
) -> None:
    _one_process("an autoencoder is evaluated")
    with console.stderr.status("evaluating") if console.stderr.is_terminal else nullcontext():
        measures = report.evaluate_autoencoder(model, data, split, batch_size)
    _keep(output, "reconstruction.json", measures)
    if output is not None:
        report.plot_robustness(measures, output / "robustness.png")
    if as_json:
        console.print_json(measures)
    else:
        curve = {f"token accuracy, extra noise {p['extra_noise']}": p["token_accuracy"] for p in measures["robustness"]}
        console.stdout.print(console.values_table(f"{model} on {data}", measures | curve))


def run_harness(
    models: list[Path],
    tasks: list[str],
    limit: int | None,
    batch_size: int,
    seed: int,
    num_latents: int,
    output: Path | None,
    as_json: bool,
) -> None:
    if len(models) > 1:
        raise UserError("--harness takes one model")
    _one_process("--harness runs")
    try:
        from calm.evaluate import harness
    except ModuleNotFoundError as error:
        raise UserError(f"--harness needs {error.name}: pip install 'calm-lm[eval]'") from error

    results = harness.run_harness(models[0], tasks, limit, batch_size, seed, num_latents)
    if results["likelihood_bound"]:
        console.warn(
            f"likelihoods of a CALM model are bounds, here from {results['likelihood_bound']} latents a chunk: scores "
            "that rest on them are not those of the model itself"
        )
    _keep(output, "harness.json", results)
    if as_json:
        console.print_json(results)
    else:
        for name, task in results["tasks"].items():
            console.stdout.print(console.values_table(name, task))


def _one_process(what: str) -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(f"{what} in one process, not under torchrun")


def _keep(output: Path | None, name: str, measures: dict) -> None:
    """Write measures into a directory, if one is wanted."""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / name, measures)
