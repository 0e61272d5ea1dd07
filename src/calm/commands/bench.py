"""The `calm bench` command: runs benchmarks and prints medians with minimum and maximum."""

import torch
from rich.table import Table

from calm import console
from calm.bench import evaluation, generation, machine, memory, scaling, training
from calm.bench.clock import Row
from calm.bench.models import SIZES
from calm.errors import UserError, did_you_mean

KINDS = {
    "training": training.measure,
    "generation": generation.measure,
    "evaluation": evaluation.measure,
    "memory": memory.measure,
    "scaling": scaling.measure,
}
ALL = "all"


def bench(what: str, size: str, rounds: int, as_json: bool) -> None:
    if what not in (ALL, *KINDS):
        near = did_you_mean(what, list(KINDS))
        raise UserError(f"unknown benchmark {what!r}: choose one of {', '.join(KINDS)} or {ALL}{near}")
    if size not in SIZES:
        raise UserError(f"--size must be one of {', '.join(SIZES)}, not {size!r}")
    if torch.cuda.is_available():
        console.warn("calm bench runs on the CPU; GPUs are not used")
    console.stderr.print("measuring hardware limits …")
    limits = machine.measured()
    description = limits.as_json()
    if not as_json:
        console.stdout.print(console.values_table("machine", description))
    results = {}
    for kind in [what] if what != ALL else KINDS:
        if what == ALL and kind == "memory" and size != "laptop":
            continue
        console.stderr.print(f"{kind} …")
        with console.stderr.status("measuring"):
            rows = list(KINDS[kind](size, rounds, limits))
        results[kind] = [row._asdict() for row in rows]
        if not as_json:
            console.stdout.print(_table(f"{kind}, size {size}, median of {rounds} rounds", rows))
    if as_json:
        console.print_json({"machine": description, "size": size, "rounds": rounds, **results})


def _table(title: str, rows: list[Row]) -> Table:
    table = Table("", "median", "min", "max", "unit", title=title)
    for row in rows:
        table.add_row(row.name, *(f"{value:,.4g}" for value in (row.median, row.low, row.high)), row.unit)
    return table
