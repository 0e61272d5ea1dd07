"""BrierLM (§4) with error bars: sums per document, accumulated over batches and processes, divided last.

The bootstrap resamples documents, since positions of one document are not independent. A score is a ratio of sums, so a
document's weight is its number of positions.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calm.errors import DataError
from calm.scores.brier import MAX_NGRAM

RESAMPLES = 1000  # of the bootstrap
SUSPICIOUS = 0.9  # share of samples that coincide
BRIER, ACCURACY, COLLISION = "brier", "accuracy", "collision"
BRIER_LM = "brier_lm"


@dataclass(frozen=True)
class Score:
    """A score with its standard error and 95% interval.

    All are None if a BrierLM is undefined because one of its factors is not above 0. The errors are None if there is
    only one document, and `low` is None if more than 2.5% of the bootstrap samples are undefined.
    """

    value: float | None
    standard_error: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, value: float, resampled: np.ndarray) -> "Score":
        """From the value and those of the bootstrap samples; NaN stands for undefined."""
        known = resampled[~np.isnan(resampled)]
        if math.isnan(value) or len(known) < 2:
            return cls(None if math.isnan(value) else value, None, None, None)
        low, high = np.quantile(np.nan_to_num(resampled, nan=-np.inf), (0.025, 0.975), method="lower").tolist()
        return cls(value, float(known.std(ddof=1)), None if math.isinf(low) else low, high)


def geometric_mean(values: np.ndarray) -> np.ndarray:
    """Over the last axis; 0 where a factor is 0, NaN where one is below."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp(np.log(values).mean(-1))


class BrierLM:
    """Accumulates accuracy P(y) and collision Σ P(x)² of n-grams, n = 1 to 4, per document.

    Example:
        >>> scores = BrierLM()
        >>> scores.add(documents, accuracy, collision)     # (P,), (P, 4), (P, 4)
        >>> scores.compute()["brier_lm"].value
    """

    def __init__(self) -> None:
        self.sums: dict[int, np.ndarray] = {}  # document → count, four accuracies, four collisions

    def add(self, documents: Tensor, accuracy: Tensor, collision: Tensor) -> None:
        """Add estimates at P positions (P, 4), and the document number of each (P,)."""
        values = torch.cat([accuracy.new_ones(len(accuracy), 1), accuracy, collision], dim=1).double()
        names, places = documents.unique(return_inverse=True)
        totals = values.new_zeros(len(names), values.shape[1]).index_add_(0, places, values)
        for name, total in zip(names.tolist(), totals.cpu().numpy(), strict=True):
            self.sums[name] = self.sums.get(name, 0.0) + total

    def merge(self, others: Iterable["BrierLM"]) -> "BrierLM":
        """Add the sums of others, from other processes or other parts of the data."""
        for other in others:
            for name, total in other.sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + total
        return self

    @classmethod
    def mean(cls, measured: list["BrierLM"]) -> "BrierLM":
        """The mean of several models on the same positions."""
        scores = cls().merge(measured)
        scores.sums = {name: total / len(measured) for name, total in scores.sums.items()}
        return scores

    def as_json(self) -> dict[str, list[float]]:
        """The sums, for a file."""
        return {str(name): [round(float(part), 6) for part in total] for name, total in sorted(self.sums.items())}

    @classmethod
    def from_json(cls, sums: dict[str, list[float]]) -> "BrierLM":
        scores = cls()
        scores.sums = {int(name): np.array(total) for name, total in sums.items()}
        return scores

    @property
    def positions(self) -> int:
        return int(sum(total[0] for total in self.sums.values()))

    def compute(self, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Any]:
        """All scores, times 100, with standard errors and intervals from a bootstrap over documents."""
        table = self._table()
        resampled = _scores(_resampled(table, resamples, seed))
        scores = {
            name: Score.of(float(value[0]), resampled[name]) for name, value in _scores(table.sum(0)[None]).items()
        }
        return {"documents": len(table), "positions": self.positions, **scores}

    def compare(self, other: "BrierLM", seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Score]:
        """This minus the other on the same documents: every difference with its paired interval."""
        mine, theirs = self._table(), other._table()
        if self.sums.keys() != other.sums.keys() or not np.array_equal(mine[:, 0], theirs[:, 0]):
            raise DataError("a paired comparison needs the same positions of the same documents")
        one, two = (_scores(table.sum(0)[None]) for table in (mine, theirs))
        more, less = (_scores(_resampled(table, resamples, seed)) for table in (mine, theirs))
        return {name: Score.of(float(one[name][0] - two[name][0]), more[name] - less[name]) for name in one}

    def warnings(self) -> list[str]:
        """What limits the validity of the scores."""
        table, warnings = self._table(), []
        if len(table) < 2:
            warnings.append("there is only one document, so there are no standard errors and intervals")
        if (coinciding := table.sum(0)[1 + MAX_NGRAM] / self.positions) > SUSPICIOUS:
            warnings.append(
                f"the samples coincide at {coinciding:.0%} of positions: a deterministic sampler has no distribution "
                "to score; is its temperature 0?"
            )
        return warnings

    def _table(self) -> np.ndarray:
        if not self.positions:
            raise DataError(f"no position was scored: all documents end before {MAX_NGRAM} tokens follow a first chunk")
        return np.stack([self.sums[name] for name in sorted(self.sums)])


def _resampled(table: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Bootstrap: sums over resampled documents (D, 9) → (resamples, 9); empty for one document."""
    documents = len(table)
    if documents < 2:
        return np.empty((0, table.shape[1]))
    generator, share = np.random.default_rng(seed), np.full(documents, 1 / documents)
    return np.stack([generator.multinomial(documents, share) @ table for _ in range(resamples)])


def _scores(sums: np.ndarray) -> dict[str, np.ndarray]:
    """Sums (R, 9) → each score (R,), times 100; NaN for an undefined BrierLM."""
    counts = sums[:, :1]
    accuracy, collision = 100 * sums[:, 1 : 1 + MAX_NGRAM] / counts, 100 * sums[:, 1 + MAX_NGRAM :] / counts
    kinds = {BRIER: 2 * accuracy - collision, ACCURACY: accuracy, COLLISION: collision}
    scores = {}
    for kind, values in kinds.items():
        if kind == BRIER:
            scores[BRIER_LM] = np.where((values > 0).all(-1), geometric_mean(values), np.nan)
        else:
            scores[kind] = geometric_mean(values)
        scores |= {f"{kind}_{n}": values[:, n - 1] for n in range(1, MAX_NGRAM + 1)}
    return scores
