"""Times that can be compared: ways of doing something take turns, so that a busy moment slows all of them."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """A measured number: its median, its smallest and its largest value."""

    name: str
    median: float
    low: float
    high: float
    unit: str


def row(name: str, values: Iterable[float], unit: str) -> Row:
    values = list(values)
    return Row(name, statistics.median(values), min(values), max(values), unit)


def take_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round; a round before them warms up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number:
                times[name].append(time.perf_counter() - began)
    return times


def ratios(over: Iterable[float], under: Iterable[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]
