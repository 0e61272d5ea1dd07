"""From measures to numbers with intervals, and from numbers to answers: does the paper's ordering hold?

Brier scores of several seeds are means over seeds. Intervals come from a bootstrap over
documents, differences are paired. Two trainings also differ by chance: how much, several seeds of the base model tell,
and the interval of a difference is made wider by it. An ordering holds if the whole interval says so, and each seed.
"""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from calm.evaluate.brier_lm import BrierLM, Score
from calm.paper.experiment import Experiment, Row
from calm.paper.runs import Run
from calm.scores.brier import LONGEST

WIDE = 1.96  # standard errors of a 95% interval
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # the same where the error is that of 2, 3, … values
YES, NO, OPEN = "yes", "no", "undecided"
FAILED = "failed"  # in the answer of a measure whose training diverged


class Value(NamedTuple):
    value: float | None
    low: float | None = None
    high: float | None = None
    by_seed: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, score: Score, by_seed: tuple[float | None, ...] = ()) -> "Value":
        return cls(score.value, score.low, score.high, by_seed)

    def wider(self, chance: float) -> "Value":
        """With an interval for another source of errors, too, which are within ± chance in 95 of 100 cases."""
        low, value, high = self.ends
        return self._replace(
            low=None if self.low is None else value - math.hypot(value - low, chance),
            high=None if self.high is None else value + math.hypot(high - value, chance),
        )

    @property
    def ends(self) -> tuple[float, float, float]:
        """Lower end, value, upper end, of one that is known."""
        assert self.value is not None
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return low, self.value, high


class Verdict(NamedTuple):
    claim: str
    answer: str  # yes, no, undecided
    numbers: str


@dataclass
class Line:
    """A row with its numbers."""

    row: Row
    values: dict[str, Value] = field(default_factory=dict)
    briers: list[BrierLM] = field(default_factory=list)  # one a seed
    failed: str | None = None  # why there are no numbers

    @property
    def trained(self) -> Run:
        """What its score is of: rows of one training differ in how it is sampled."""
        return next(measure.run for measure in self.row.measures if measure.kind == "scores")

    @property
    def brier(self) -> BrierLM:
        return BrierLM.mean(self.briers)


@dataclass
class Table:
    experiment: Experiment
    lines: dict[str, Line]
    repeats: list[BrierLM] = field(default_factory=list)  # the base model with one seed and another

    def series(self, name: str) -> list[Line]:
        return [line for line in self.lines.values() if line.row.series == name]

    def learns_nothing(self, claim: str, label: str) -> Verdict:
        """Whether training failed, or a Brier-n is surely not above 0, so that BrierLM, which multiplies them, is none.

        A Brier-1 that is surely above 0, with no such other, says that something was learnt.
        """
        line = self.lines[label]
        if line.failed:
            return Verdict(claim, YES, f"the training of {label} diverged")
        parts = {n: line.values[f"brier_{n}"].wider(self.chance(f"brier_{n}") or 0.0) for n in range(1, LONGEST + 1)}
        lowest = min(parts, key=lambda n: parts[n].ends[2])
        if parts[lowest].ends[2] <= 0:
            return Verdict(claim, YES, f"Brier-{lowest} of {label}: {_shown(parts[lowest])}")
        return Verdict(claim, NO if parts[1].ends[0] > 0 else OPEN, f"Brier-1 of {label}: {_shown(parts[1])}")

    def better(self, claim: str, more: str, less: str) -> Verdict:
        """Whether one row has the higher BrierLM; where one has none, or perhaps none, the higher Brier-1."""
        one, two = self.lines[more], self.lines[less]
        if failed := [line.row.label for line in (one, two) if line.failed]:
            answer = OPEN if len(failed) == 2 else NO if one.failed else YES
            return Verdict(claim, answer, f"the training of {' and '.join(failed)} diverged")
        known = self.chance("brier_lm") is not None and all(
            line.values["brier_lm"].low is not None for line in (one, two)
        )
        column, title = ("brier_lm", "BrierLM") if known else ("brier_1", "no sure BrierLM; Brier-1")
        difference = Value.of(one.brier.compare(two.brier)[column])
        counts = len(one.briers), len(two.briers)
        pairs = zip(one.briers, two.briers, strict=True) if counts[0] == counts[1] else ()
        seeds = [a.compare(b, redraws=2)[column].value for a, b in pairs]
        trainings = 0.0 if one.trained == two.trained else math.sqrt(sum(1 / count for count in counts))
        found = difference.wider(trainings * (self.chance(column) or 0.0))
        numbers = f"{title}: {one.row.label} - {two.row.label} = {_shown(found, '+')}"
        return Verdict(claim, _sign(found, seeds), numbers)

    def chance(self, column: str) -> float | None:
        """How far a score may lie from another seed's, in 95 of 100 trainings; None if a seed has no such score."""
        values = [brier.compute(redraws=2)[column].value for brier in self.repeats]
        if None in values:
            return None
        return STUDENT[len(values) - 2] * statistics.stdev(values) if len(values) > 1 else 0.0


def _sign(difference: Value, seeds: list[float | None]) -> str:
    if difference.low is None or difference.high is None:
        return OPEN
    if difference.low > 0 and all((value or 0) > 0 for value in seeds):
        return YES
    return NO if difference.high < 0 and all((value or 0) < 0 for value in seeds) else OPEN


def _shown(value: Value, sign: str = "") -> str:
    ends = ["?" if end is None else f"{end:{sign}.3g}" for end in (value.low, value.high)]
    return f"{value.value:{sign}.3g} ({ends[0]} to {ends[1]})"


def fill(
    experiment: Experiment,
    rows: list[Row],
    found: dict[str, list[list[dict[str, Any]]]],
    repeats: list[dict[str, Any]] | None = None,
) -> Table:
    """`found` has, for each label, what each measure gave, one answer a seed; `repeats` the base model's scores."""
    lines = {row.label: _line(row, found[row.label], experiment) for row in rows}
    if experiment.reference in lines:
        one = lines[experiment.reference].values["step_seconds"].value
        for line in lines.values():
            mine = line.values["step_seconds"].value
            line.values["relative_cost"] = Value(mine / one if mine and one else None)
    return Table(experiment, lines, [BrierLM.from_json(each["sums"]) for each in repeats or [] if FAILED not in each])


def _line(row: Row, answers: list[list[dict[str, Any]]], experiment: Experiment) -> Line:
    line = Line(row)
    if failed := [answer[FAILED] for seeds in answers for answer in seeds if FAILED in answer]:
        return Line(row, {name: Value(None) for name in experiment.columns}, failed=failed[0])
    for measure, seeds in zip(row.measures, answers, strict=True):
        if measure.kind == "scores":
            line.briers = [BrierLM.from_json(answer["sums"]) for answer in seeds]
            line.values |= _brier_values(line)
            if "cross_entropy" in seeds[0]:
                nats = [answer["cross_entropy"] for answer in seeds]
                line.values["cross_entropy"] = Value(float(np.mean(nats)), by_seed=tuple(nats))
        elif measure.kind == "tradeoff":
            line.values |= _plane(seeds[0])
        elif measure.kind == "reconstruction":
            line.values |= _reconstruction(seeds[0])
        else:
            line.values |= {name: Value(value) for name, value in seeds[0].items() if value is not None}
    return line


def _brier_values(line: Line) -> dict[str, Value]:
    scores = line.brier.compute()
    seeds = [brier.compute(redraws=2) for brier in line.briers]
    return {
        name: Value.of(score, tuple(each[name].value for each in seeds))
        for name, score in scores.items()
        if isinstance(score, Score)
    }


def _plane(answer: dict[str, Any]) -> dict[str, Value]:
    """Geometric means over 1- to 4-grams, as in the paper, and the first token alone."""
    found = {}
    for name in ("accuracy", "collision"):
        found[name] = _around(answer[f"{name}_geometric"], answer[f"{name}_geometric_error"])
        found[f"{name}_1"] = _around(answer[name][0], answer[f"{name}_error"][0])
    return found


def _reconstruction(answer: dict[str, Any]) -> dict[str, Value]:
    share, count = answer["token_accuracy"], answer["tokens"]
    accuracy = _around(100 * share, 100 * math.sqrt(share * (1 - share) / count))
    return {"token_accuracy": accuracy} | {
        name: Value(answer[name]) for name in ("collapsed_dimensions", "mean_sigma", "latent_size")
    }


def _around(value: float, error: float) -> Value:
    return Value(value, value - WIDE * error, value + WIDE * error)
