"""From measures to numbers with intervals, and from numbers to answers: does the paper's ordering hold?

Brier scores of several seeds are means over seeds: their sums are added. Intervals come from a bootstrap over
documents, differences are paired. An ordering holds if the whole 95% interval of the difference says so, and each seed.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from calm.evaluate.brier_lm import BrierLM, Score
from calm.paper.experiment import Experiment, Row

WIDE = 1.96  # standard errors of a 95% interval
YES, NO, OPEN = "yes", "no", "undecided"
FAILED = "failed"  # in the answer of a measure whose training diverged


class Value(NamedTuple):
    value: float | None
    low: float | None = None
    high: float | None = None
    by_seed: tuple[float | None, ...] = ()

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
    def brier(self) -> BrierLM:
        return BrierLM().merge(self.briers)


@dataclass
class Table:
    experiment: Experiment
    lines: dict[str, Line]

    def series(self, name: str) -> list[Line]:
        return [line for line in self.lines.values() if line.row.series == name]

    def learns_nothing(self, claim: str, label: str) -> Verdict:
        """Whether training failed, or its model is not better than one that gives every text the probability 0."""
        line = self.lines[label]
        if line.failed:
            return Verdict(claim, YES, f"the training of {label} diverged")
        low, value, high = line.values["brier_1"].ends
        answer = YES if high <= 0 else NO if low > 0 else OPEN
        return Verdict(claim, answer, f"Brier-1 of {label}: {value:.3g} ({low:.3g} to {high:.3g})")

    def better(self, claim: str, more: str, less: str) -> Verdict:
        """Whether one row has the higher BrierLM; where one has none, or perhaps none, the higher Brier-1."""
        one, two = self.lines[more], self.lines[less]
        if failed := [line.row.label for line in (one, two) if line.failed]:
            answer = OPEN if len(failed) == 2 else NO if one.failed else YES
            return Verdict(claim, answer, f"the training of {' and '.join(failed)} diverged")
        known = all(line.values["brier_lm"].low is not None for line in (one, two))
        column, title = ("brier_lm", "BrierLM") if known else ("brier_1", "no sure BrierLM; Brier-1")
        difference = one.brier.compare(two.brier)[column]
        pairs = zip(one.briers, two.briers, strict=True)
        seeds = [a.compare(b, redraws=2)[column].value for a, b in pairs]
        return Verdict(
            claim, _sign(difference, seeds), f"{title}: {one.row.label} - {two.row.label} = {_shown(difference)}"
        )


def _sign(difference: Score, seeds: list[float | None]) -> str:
    low, high = difference.low, difference.high
    if low is None or high is None:
        return OPEN
    if low > 0 and all((value or 0) > 0 for value in seeds):
        return YES
    return NO if high < 0 and all((value or 0) < 0 for value in seeds) else OPEN


def _shown(score: Score) -> str:
    ends = [f"{end:+.3g}" if end is not None else "?" for end in (score.low, score.high)]
    return f"{score.value:+.3g} ({ends[0]} to {ends[1]})"


def fill(experiment: Experiment, rows: list[Row], found: dict[str, list[list[dict[str, Any]]]]) -> Table:
    """`found` has, for each label, what each measure gave, one answer a seed."""
    lines = {row.label: _line(row, found[row.label], experiment) for row in rows}
    if experiment.reference in lines:
        one = lines[experiment.reference].values["step_seconds"].value
        for line in lines.values():
            mine = line.values["step_seconds"].value
            line.values["relative_cost"] = Value(mine / one if mine and one else None)
    return Table(experiment, lines)


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
        name: Value(score.value, score.low, score.high, tuple(each[name].value for each in seeds))
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
