"""The `calm reproduce` command: selects experiments, runs them and prints verdicts."""

from pathlib import Path
from typing import Any

from rich.markup import escape

from calm import console
from calm.distributed import process_group
from calm.errors import UserError, did_you_mean
from calm.paper.experiment import Experiment
from calm.paper.experiments import EXPERIMENTS
from calm.paper.report import REPORT, write_experiment, write_report
from calm.paper.reproduce import Reproduction, reproduction
from calm.paper.scales import Scale

ALL = "all"


def show_names() -> None:
    for experiment in EXPERIMENTS.values():
        console.stdout.print(f"{experiment.name:28}{experiment.title} [dim]({escape(experiment.source)})[/]")


def _select(name: str, scale: Scale) -> list[Experiment]:
    if name != ALL and name not in EXPERIMENTS:
        near = did_you_mean(name, [*EXPERIMENTS, ALL])
        raise UserError(f"unknown experiment {name!r}: choose one of {', '.join(EXPERIMENTS)} or {ALL}{near}")
    selected = list(EXPERIMENTS.values()) if name == ALL else [EXPERIMENTS[name]]
    supported = [experiment for experiment in selected if scale.chunk_size in experiment.chunk_sizes]
    if not supported:
        sizes = ", ".join(map(str, EXPERIMENTS[name].chunk_sizes))
        raise UserError(f"{name} does not support --chunk-size {scale.chunk_size}; use {sizes}")
    for experiment in selected:
        if experiment not in supported:
            console.warn(f"skipping {experiment.name}: it does not support --chunk-size {scale.chunk_size}")
    return supported


def print_plan(experiments: list[Experiment], reproduction: Reproduction) -> None:
    """Print the training runs as `calm train` commands."""
    commands = [command for experiment in experiments for command in reproduction.commands(experiment)]
    print("\n".join(dict.fromkeys(commands)))


def reproduce(
    name: str, scale: Scale, output: Path | None, data: Path | None, resume: bool, plan: bool, as_json: bool
) -> None:
    experiments = _select(name, scale)
    output = output or Path("reproduction") / scale.directory
    screen = console.StageScreen()
    if plan:
        with process_group() as world:
            print_plan(experiments, Reproduction(scale, output, screen, world, data=data))
        return
    with reproduction(scale, output, screen, data=data, resume=resume) as run:
        is_main = run.world.is_main
        if scale.name == "paper" and is_main:
            print_plan(experiments, run)
        new = False
        for number, experiment in enumerate(experiments, 1):
            run.run(experiment, f"{number}/{len(experiments)} " if len(experiments) > 1 else "")
            new |= is_main and write_experiment(run, experiment)
        if is_main and (new or not (output / REPORT).exists()):
            write_report(run)
        stored = run.results.experiments
    if not is_main:
        return
    if as_json:
        console.print_json({experiment.name: stored[experiment.name] for experiment in experiments})
    else:
        for experiment in experiments:
            show(experiment, stored[experiment.name])
        console.stdout.print(f"Tables, figures and {REPORT} are in {output}", soft_wrap=True)


def show(experiment: Experiment, numbers: dict[str, Any]) -> None:
    """Print the verdicts of an experiment, one per line."""
    console.stdout.print(f"[bold]{experiment.title}[/] [dim]({experiment.name})[/]")
    for verdict in numbers["verdicts"]:
        color = {"yes": "green", "no": "red"}.get(verdict["answer"], "yellow")
        line = f"  [{color}]{verdict['answer']:>9}[/]  {verdict['claim']}  [dim]{escape(verdict['numbers'])}[/]"
        console.stdout.print(line, soft_wrap=True)
