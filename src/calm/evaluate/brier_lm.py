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

    All are None for a BrierLM without meaning, one of whose factors is not above 0; the errors also where documents
    were not drawn again.
    """

    value: float | None
    standard_error: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, value: float, redrawn: np.ndarray) -> "Score":
        """From the value, NaN where it has no meaning, and those of redrawn samples."""
        if math.isnan(value):
            return cls(None, None, None, None)
        if len(redrawn) < 2:
            return cls(value, None, None, None)
        low, high = np.quantile(redrawn, (0.025, 0.975)).tolist()
        return cls(value, float(redrawn.std(ddof=1)), low, high)


def geometric_mean(values: np.ndarray) -> np.ndarray:
    """Over the last axis; 0 where a factor is not positive."""
    positive = (values > 0).all(-1)
    return np.where(positive, np.exp(np.log(np.where(values > 0, values, 1.0)).mean(-1)), 0.0)


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

    @property
    def positions(self) -> int:
        return int(sum(total[0] for total in self.sums.values()))

    def compute(self, seed: int = 0, redraws: int = REDRAWS) -> dict[str, Any]:
        """Every score, times 100, with standard error and interval by a bootstrap over documents."""
        table = self._table()
        whole = _values(table)
        redrawn = _scores(_weights(len(table), redraws, seed) @ table)
        scores = {name: Score.of(value, redrawn[name]) for name, value in whole.items()}
        return {"documents": len(table), "positions": self.positions, **scores}

    def compare(self, other: "BrierLM", seed: int = 0, redraws: int = REDRAWS) -> dict[str, Score]:
        """This minus the other, on the same documents: the paired interval of every difference."""
        if self.sums.keys() != other.sums.keys() or self.positions != other.positions:
            raise DataError("a paired comparison needs the same positions of the same documents")
        mine, theirs = self._table(), other._table()
        weights = _weights(len(mine), redraws, seed)
        one, two = _values(mine), _values(theirs)
        more, less = _scores(weights @ mine), _scores(weights @ theirs)
        return {name: Score.of(one[name] - two[name], more[name] - less[name]) for name in one}

    def warnings(self) -> list[str]:
        """What a reader of the scores should know."""
        collisions = self._table().sum(0)[1 + LONGEST :] / self.positions
        if collisions[0] > SUSPICIOUS:
            return [
                f"the draws coincide at {collisions[0]:.0%} of positions: a sampler that always says the same has no "
                "distribution to score; is its temperature 0?"
            ]
        return []

    def _table(self) -> np.ndarray:
        if not self.positions:
            raise DataError(f"no position was scored: every document is shorter than a start and {LONGEST} tokens")
        return np.stack([self.sums[name] for name in sorted(self.sums)])


def _weights(documents: int, redraws: int, seed: int) -> np.ndarray:
    """How often each document is drawn in each redrawn sample: (redraws, documents)."""
    return np.random.default_rng(seed).multinomial(documents, np.full(documents, 1 / documents), size=redraws)


def _values(table: np.ndarray) -> dict[str, float]:
    """The scores of all documents; NaN for a BrierLM that one of its factors leaves without meaning."""
    found = {name: float(values[0]) for name, values in _scores(table.sum(0)[None]).items()}
    return found if found[BRIER_LM] > 0 else {**found, BRIER_LM: math.nan}


def _scores(sums: np.ndarray) -> dict[str, np.ndarray]:
    """Sums of samples (R, 9) → each score (R,), times 100."""
    counts = np.maximum(sums[:, :1], 1)
    accuracy, collision = 100 * sums[:, 1 : 1 + LONGEST] / counts, 100 * sums[:, 1 + LONGEST :] / counts
    kinds = {BRIER: 2 * accuracy - collision, ACCURACY: accuracy, COLLISION: collision}
    found = {}
    for kind, values in kinds.items():
        found[BRIER_LM if kind == BRIER else kind] = geometric_mean(values)
        found |= {f"{kind}_{n}": values[:, n - 1] for n in range(1, LONGEST + 1)}
    return found
