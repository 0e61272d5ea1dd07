"""Interleaved timing: the functions to compare run in turn, so that background load affects all of them equally."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """A measured quantity: median, minimum and maximum over rounds."""

    name: str
    median: float
    low: float
    high: float
    unit: str


def row(name: str, values: Iterable[float], unit: str) -> Row:
    values = list(values)
    return Row(name, statistics.median(values), min(values), max(values), unit)


def take_turns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Run all functions in turn, `rounds` times after one warm-up round.

    Returns:
        Seconds per round for each function.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> list[float]:
    """Element-wise ratios."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]
