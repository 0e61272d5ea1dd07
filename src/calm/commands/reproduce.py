"""`calm reproduce` for people: which experiments, what is shown of them."""

import os
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
        console.stdout.print(f"{experiment.name:28}{experiment.title} [dim]({escape(experiment.place)})[/]")


def chosen(name: str, scale: Scale) -> list[Experiment]:
    if name != ALL and name not in EXPERIMENTS:
        near = did_you_mean(name, [*EXPERIMENTS, ALL])
        raise UserError(f"no experiment {name!r}: there are {', '.join(EXPERIMENTS)} and {ALL}{near}")
    wanted = list(EXPERIMENTS.values()) if name == ALL else [EXPERIMENTS[name]]
    fit = [experiment for experiment in wanted if scale.chunk_size in experiment.chunk_sizes]
    if not fit:
        sizes = ", ".join(map(str, EXPERIMENTS[name].chunk_sizes))
        raise UserError(f"{name} is made with chunks of {sizes} tokens, not with --chunk-size {scale.chunk_size}")
    for experiment in wanted:
        if experiment not in fit:
            console.warn(f"{experiment.name} is left out: it is not made with --chunk-size {scale.chunk_size}")
    return fit


def print_plan(experiments: list[Experiment], made: Reproduction) -> None:
    """What would be trained, as commands that can be run by hand."""
    commands = [command for experiment in experiments for command in made.commands(experiment)]
    print("\n".join(dict.fromkeys(commands)))


def reproduce(
    name: str, scale: Scale, output: Path | None, data: Path | None, resume: bool, plan: bool, as_json: bool
) -> None:
    experiments = chosen(name, scale)
    output = output or Path("reproduction") / scale.directory
    first = os.environ.get("RANK", "0") == "0"
    screen = console.StageScreen() if first else console.SilentScreen()
    if plan:
        with process_group() as world:
            print_plan(experiments, Reproduction(scale, output, screen, world, data=data))
        return
    with reproduction(scale, output, screen, data=data, resume=resume) as made:
        if scale.name == "paper" and first:
            print_plan(experiments, made)
        new = False
        for number, experiment in enumerate(experiments, 1):
            made.run(experiment, f"{number}/{len(experiments)} " if len(experiments) > 1 else "")
            new |= first and write_experiment(made, experiment)
        if first and (new or not (output / REPORT).exists()):
            write_report(made)
        found = made.results.experiments
    if first and as_json:
        console.print_json({experiment.name: found[experiment.name] for experiment in experiments})
    elif first:
        for experiment in experiments:
            show(experiment, found[experiment.name])
        console.stdout.print(f"Tables, figures and {REPORT} are in {output}", soft_wrap=True)


def show(experiment: Experiment, numbers: dict[str, Any]) -> None:
    """The answers, one line each."""
    console.stdout.print(f"[bold]{experiment.title}[/] [dim]({experiment.name})[/]")
    for verdict in numbers["verdicts"]:
        colour = {"yes": "green", "no": "red"}.get(verdict["answer"], "yellow")
        line = f"  [{colour}]{verdict['answer']:>9}[/]  {verdict['claim']}  [dim]{escape(verdict['numbers'])}[/]"
        console.stdout.print(line, soft_wrap=True)
