"""BrierLM (§4) with error bars: sums of each document, gathered over batches and processes, divided last.

Documents are what is drawn again in the bootstrap, since positions of one document are not independent. A score is a
ratio of sums, so every document weighs as many positions as it has.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calm.errors import DataError
from calm.scores.brier import LONGEST

REDRAWS = 1000
SUSPICIOUS = 0.9  # of draws that coincide
BRIER, ACCURACY, COLLISION = "brier", "accuracy", "collision"
BRIER_LM = "brier_lm"


@dataclass(frozen=True)
class Score:
    """A number with its standard error and its 95% interval.

    All are None for a BrierLM without meaning, one of whose factors is not above 0. The errors are None where there is
    one document only, and the lower end where more than 2.5% of redrawn samples have no meaning.
    """

    value: float | None
    standard_error: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, value: float, redrawn: np.ndarray) -> "Score":
        """From the value and those of redrawn samples; NaN stands for what has no meaning."""
        known = redrawn[~np.isnan(redrawn)]
        if math.isnan(value) or len(known) < 2:
            return cls(None if math.isnan(value) else value, None, None, None)
        low, high = np.quantile(np.nan_to_num(redrawn, nan=-np.inf), (0.025, 0.975), method="lower").tolist()
        return cls(value, float(known.std(ddof=1)), None if math.isinf(low) else low, high)


def geometric_mean(values: np.ndarray) -> np.ndarray:
    """Over the last axis; 0 where a factor is 0, NaN where one is below."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp(np.log(values).mean(-1))


class BrierLM:
    """Accuracy P(y) and collision Σ P(x)² of n-grams, n = 1 to 4, summed over the positions of each document."""

    def __init__(self) -> None:
        self.sums: dict[int, np.ndarray] = {}  # document → count, four accuracies, four collisions

    def add(self, documents: Tensor, accuracy: Tensor, collision: Tensor) -> None:
        """Estimates at some positions (P, 4), and the number of the document (P,) that each lies in."""
        values = torch.cat([accuracy.new_ones(len(accuracy), 1), accuracy, collision], dim=1).double()
        names, places = documents.unique(return_inverse=True)
        totals = values.new_zeros(len(names), values.shape[1]).index_add_(0, places, values)
        for name, total in zip(names.tolist(), totals.cpu().numpy(), strict=True):
            self.sums[name] = self.sums.get(name, 0.0) + total

    def merge(self, others: Iterable["BrierLM"]) -> "BrierLM":
        """Add what others have seen, on other processes or in other parts of the data."""
        for other in others:
            for name, total in other.sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + total
        return self

    @classmethod
    def mean(cls, measured: list["BrierLM"]) -> "BrierLM":
        """Of several models on the same positions."""
        found = cls().merge(measured)
        found.sums = {name: total / len(measured) for name, total in found.sums.items()}
        return found

    def as_json(self) -> dict[str, list[float]]:
        """The sums, for a file."""
        return {str(name): [round(float(part), 6) for part in total] for name, total in sorted(self.sums.items())}

    @classmethod
    def from_json(cls, sums: dict[str, list[float]]) -> "BrierLM":
        found = cls()
        found.sums = {int(name): np.array(total) for name, total in sums.items()}
        return found

    @property
    def positions(self) -> int:
        return int(sum(total[0] for total in self.sums.values()))

    def compute(self, seed: int = 0, redraws: int = REDRAWS) -> dict[str, Any]:
        """Every score, times 100, with standard error and interval by a bootstrap over documents."""
        table = self._table()
        redrawn = _scores(_redrawn(table, redraws, seed))
        scores = {name: Score.of(float(value[0]), redrawn[name]) for name, value in _scores(table.sum(0)[None]).items()}
        return {"documents": len(table), "positions": self.positions, **scores}

    def compare(self, other: "BrierLM", seed: int = 0, redraws: int = REDRAWS) -> dict[str, Score]:
        """This minus the other, on the same documents: the paired interval of every difference."""
        mine, theirs = self._table(), other._table()
        if self.sums.keys() != other.sums.keys() or not np.array_equal(mine[:, 0], theirs[:, 0]):
            raise DataError("a paired comparison needs the same positions of the same documents")
        one, two = (_scores(table.sum(0)[None]) for table in (mine, theirs))
        more, less = (_scores(_redrawn(table, redraws, seed)) for table in (mine, theirs))
        return {name: Score.of(float(one[name][0] - two[name][0]), more[name] - less[name]) for name in one}

    def warnings(self) -> list[str]:
        """What a reader of the scores should know."""
        table, found = self._table(), []
        if len(table) < 2:
            found.append("there is one document only, so there are no errors and intervals: they come from many")
        if (coinciding := table.sum(0)[1 + LONGEST] / self.positions) > SUSPICIOUS:
            found.append(
                f"the draws coincide at {coinciding:.0%} of positions: a sampler that always says the same has no "
                "distribution to score; is its temperature 0?"
            )
        return found

    def _table(self) -> np.ndarray:
        if not self.positions:
            raise DataError(f"no position was scored: every document is shorter than a start and {LONGEST} tokens")
        return np.stack([self.sums[name] for name in sorted(self.sums)])


def _redrawn(table: np.ndarray, redraws: int, seed: int) -> np.ndarray:
    """Sums over documents (D, 9) that are drawn again, as many as there are: (redraws, 9); of one document none."""
    documents = len(table)
    if documents < 2:
        return np.empty((0, table.shape[1]))
    generator, share = np.random.default_rng(seed), np.full(documents, 1 / documents)
    return np.stack([generator.multinomial(documents, share) @ table for _ in range(redraws)])


def _scores(sums: np.ndarray) -> dict[str, np.ndarray]:
    """Sums of samples (R, 9) → each score (R,), times 100; NaN for a BrierLM one of whose factors is not above 0."""
    counts = sums[:, :1]
    accuracy, collision = 100 * sums[:, 1 : 1 + LONGEST] / counts, 100 * sums[:, 1 + LONGEST :] / counts
    kinds = {BRIER: 2 * accuracy - collision, ACCURACY: accuracy, COLLISION: collision}
    found = {}
    for kind, values in kinds.items():
        if kind == BRIER:
            found[BRIER_LM] = np.where((values > 0).all(-1), geometric_mean(values), np.nan)
        else:
            found[kind] = geometric_mean(values)
        found |= {f"{kind}_{n}": values[:, n - 1] for n in range(1, LONGEST + 1)}
    return found
