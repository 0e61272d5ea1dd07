"""An experiment: table rows and their measures, the paper's numbers, a figure, and testable claims.

Stored measures become a `Table` of values with 95% intervals, from which claims are decided. Brier scores are averaged
over seeds. Intervals are bootstrapped over documents; differences are paired. Scores also vary across training seeds:
this variance is estimated from several seeds of the base model and added to the interval of each difference. An
ordering counts as reproduced if the whole interval and every seed agree with it.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from calm.evaluate.brier_lm import BrierLM, Score
from calm.paper.measures import Measure, base_scores
from calm.paper.scales import CHUNK_SIZES, Run, Scale
from calm.scores.brier import MAX_NGRAM

Lookup = Callable[[Measure], dict[str, Any] | None]  # returns the stored result of a measure, if any

BRIERS = {f"brier_{n}": f"Brier-{n}" for n in range(1, MAX_NGRAM + 1)} | {"brier_lm": "BrierLM"}
SCORES = {"brier_lm": "BrierLM (percent)"}  # column → axis label
TWO_SCORES = SCORES | {"brier_1": "Brier-1 (percent)"}
RECONSTRUCTION = {"token_accuracy": "reconstruction accuracy (%)"}

Z_95 = 1.96  # half-width of a normal 95% interval in standard errors
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, for 2, 3, … samples
YES, NO, UNDECIDED = "yes", "no", "undecided"
FAILED = "failed"  # key in the result of a measure whose training run diverged


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    label: str
    measures: tuple[Measure, ...]
    paper: dict[str, Any] = field(default_factory=dict)  # column → value reported in the paper
    series: str = ""  # the figure connects rows of the same series
    x: float | None = None  # position on the x axis


@dataclass(frozen=True)
class Figure:
    x: str = ""  # x axis label; if empty, each row gets its own tick
    panels: dict[str, str] = field(default_factory=lambda: SCORES)  # column → y axis label
    x_column: str | None = None  # column to plot on the x axis instead of Row.x
    log_x: bool = False
    annotate: bool = True  # label the points if x_column is set


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    source: str  # the table, figure or section of the paper
    finding: str  # the paper's result
    rows: Callable[[Scale, Lookup], list[Row]]  # called again after each round until no measures are pending
    claims: Callable[["Table"], list["Verdict"]]
    columns: dict[str, str] = field(default_factory=lambda: BRIERS)
    figure: Figure = field(default_factory=Figure)
    repeat: Callable[[Scale, int], Measure] | None = base_scores  # base model by seed, for the variance across seeds
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES  # supported values of K
    cost_baseline: str = ""  # label of the row with relative cost 1
    note: str = ""


class Value(NamedTuple):
    """A value with the bounds of its 95% interval, and the values of the individual seeds."""

    value: float | None
    low: float | None = None
    high: float | None = None
    by_seed: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, score: Score, by_seed: tuple[float | None, ...] = ()) -> "Value":
        return cls(score.value, score.low, score.high, by_seed)

    def widened(self, margin: float) -> "Value":
        """Add an independent source of error with a 95% interval of ± `margin` to the interval."""
        low, value, high = self.bounds
        return self._replace(
            low=None if self.low is None else value - math.hypot(value - low, margin),
            high=None if self.high is None else value + math.hypot(high - value, margin),
        )

    @property
    def bounds(self) -> tuple[float, float, float]:
        """(low, value, high); missing bounds default to the value, which must not be None."""
        assert self.value is not None
        low, high = (self.value if bound is None else bound for bound in (self.low, self.high))
        return low, self.value, high


class Verdict(NamedTuple):
    claim: str
    answer: str  # YES, NO or UNDECIDED
    numbers: str


@dataclass
class Line:
    """A row with its values."""

    row: Row
    values: dict[str, Value] = field(default_factory=dict)
    briers: list[BrierLM] = field(default_factory=list)  # one per seed
    failed: str | None = None  # why training failed, if it did

    @property
    def run(self) -> Run:
        """The training run that was scored; rows that differ only in sampling share it."""
        return next(measure.run for measure in self.row.measures if measure.kind == "scores")

    @property
    def brier(self) -> BrierLM:
        """Scores averaged over seeds."""
        return BrierLM.mean(self.briers)

    def value(self, column: str) -> float | None:
        """The value of a column, or None if it is undefined or was not measured."""
        return self.values[column].value if column in self.values else None


@dataclass
class Table:
    experiment: Experiment
    lines: dict[str, Line]
    repeats: list[BrierLM] = field(default_factory=list)  # scores of the base model, one per seed

    def series(self, name: str) -> list[Line]:
        return [line for line in self.lines.values() if line.row.series == name]

    def fails_to_learn(self, claim: str, label: str) -> Verdict:
        """Test whether training diverged or BrierLM is undefined because the interval of some Brier-n is at or below 0.

        The answer is NO if there is no such Brier-n and the interval of Brier-1 is above 0.
        """
        line = self.lines[label]
        if line.failed:
            return Verdict(claim, YES, f"{label}: training diverged")
        parts = {
            n: line.values[f"brier_{n}"].widened(self.seed_margin(f"brier_{n}") or 0.0) for n in range(1, MAX_NGRAM + 1)
        }
        lowest = min(parts, key=lambda n: parts[n].bounds[2])
        if parts[lowest].bounds[2] <= 0:
            return Verdict(claim, YES, f"Brier-{lowest} of {label}: {_formatted(parts[lowest])}")
        return Verdict(
            claim, NO if parts[1].bounds[0] > 0 else UNDECIDED, f"Brier-1 of {label}: {_formatted(parts[1])}"
        )

    def better(self, claim: str, more: str, less: str) -> Verdict:
        """Test whether row `more` has a higher BrierLM than row `less`.

        Compares Brier-1 instead if the BrierLM of either row may be undefined.
        """
        first, second = self.lines[more], self.lines[less]
        if failed := [line.row.label for line in (first, second) if line.failed]:
            answer = UNDECIDED if len(failed) == 2 else NO if first.failed else YES
            return Verdict(claim, answer, f"{' and '.join(failed)}: training diverged")
        defined = self.seed_margin("brier_lm") is not None and all(
            line.values["brier_lm"].low is not None for line in (first, second)
        )
        column, title = ("brier_lm", "BrierLM") if defined else ("brier_1", "BrierLM may be undefined; Brier-1")
        difference = Value.of(first.brier.compare(second.brier)[column])
        counts = len(first.briers), len(second.briers)
        pairs = zip(first.briers, second.briers, strict=True) if counts[0] == counts[1] else ()
        by_seed = [a.compare(b, resamples=2)[column].value for a, b in pairs]
        factor = 0.0 if first.run == second.run else math.sqrt(sum(1 / count for count in counts))
        difference = difference.widened(factor * (self.seed_margin(column) or 0.0))
        numbers = f"{title}: {first.row.label} - {second.row.label} = {_formatted(difference, '+')}"
        return Verdict(claim, _sign(difference, by_seed), numbers)

    def seed_margin(self, column: str) -> float | None:
        """Half-width of the 95% interval of a score across training seeds; None if it is undefined for any seed."""
        values = [brier.compute(resamples=2)[column].value for brier in self.repeats]
        if None in values:
            return None
        return T_95[len(values) - 2] * statistics.stdev(values) if len(values) > 1 else 0.0


def _sign(difference: Value, by_seed: list[float | None]) -> str:
    if difference.low is None or difference.high is None:
        return UNDECIDED
    if difference.low > 0 and all((value or 0) > 0 for value in by_seed):
        return YES
    return NO if difference.high < 0 and all((value or 0) < 0 for value in by_seed) else UNDECIDED


def _formatted(value: Value, sign: str = "") -> str:
    low, high = ("?" if bound is None else f"{bound:{sign}.3g}" for bound in (value.low, value.high))
    return f"{value.value:{sign}.3g} ({low} to {high})"


def build_table(
    experiment: Experiment,
    rows: list[Row],
    results: dict[str, list[list[dict[str, Any]]]],
    repeats: list[dict[str, Any]] | None = None,
) -> Table:
    """Build the table of an experiment from stored results.

    Args:
        results: For each row label, a list over the row's measures of lists with one result per seed.
        repeats: Scores of the base model, one result per seed.
    """
    lines = {row.label: _line(row, results[row.label], experiment) for row in rows}
    if experiment.cost_baseline in lines:
        baseline = lines[experiment.cost_baseline].value("step_seconds")
        for line in lines.values():
            seconds = line.value("step_seconds")
            line.values["relative_cost"] = Value(seconds / baseline if seconds and baseline else None)
    return Table(experiment, lines, [BrierLM.from_json(each["sums"]) for each in repeats or [] if FAILED not in each])


def _line(row: Row, results: list[list[dict[str, Any]]], experiment: Experiment) -> Line:
    line = Line(row)
    if failed := [result[FAILED] for seeds in results for result in seeds if FAILED in result]:
        return Line(row, {name: Value(None) for name in experiment.columns}, failed=failed[0])
    for measure, seeds in zip(row.measures, results, strict=True):
        if measure.kind == "scores":
            line.briers = [BrierLM.from_json(result["sums"]) for result in seeds]
            line.values |= _brier_values(line)
            if "cross_entropy" in seeds[0]:
                nats = [result["cross_entropy"] for result in seeds]
                line.values["cross_entropy"] = Value(float(np.mean(nats)), by_seed=tuple(nats))
        elif measure.kind == "tradeoff":
            line.values |= _tradeoff(seeds[0])
        elif measure.kind == "reconstruction":
            line.values |= _reconstruction(seeds[0])
        else:
            line.values |= {name: Value(value) for name, value in seeds[0].items() if value is not None}
    return line


def _brier_values(line: Line) -> dict[str, Value]:
    scores = line.brier.compute()
    seeds = [brier.compute(resamples=2) for brier in line.briers]
    return {
        name: Value.of(score, tuple(each[name].value for each in seeds))
        for name, score in scores.items()
        if isinstance(score, Score)
    }


def _tradeoff(result: dict[str, Any]) -> dict[str, Value]:
    """Geometric means over 1- to 4-grams, as in the paper, and the values of the first token."""
    values = {}
    for name in ("accuracy", "collision"):
        values[name] = _normal_interval(result[f"{name}_geometric"], result[f"{name}_geometric_error"])
        values[f"{name}_1"] = _normal_interval(result[name][0], result[f"{name}_error"][0])
    return values


def _reconstruction(result: dict[str, Any]) -> dict[str, Value]:
    share, count = result["token_accuracy"], result["tokens"]
    accuracy = _normal_interval(100 * share, 100 * math.sqrt(share * (1 - share) / count))
    return {"token_accuracy": accuracy} | {
        name: Value(result[name]) for name in ("collapsed_dimensions", "mean_sigma", "latent_size")
    }


def _normal_interval(value: float, standard_error: float) -> Value:
    return Value(value, value - Z_95 * standard_error, value + Z_95 * standard_error)
