"""Brier scores from samples (§4), as pure functions. Higher is better.

    Brier(P, y) = 2·P(y) - Σ P(x)²  ≈  1{x1 = y} + 1{x2 = y} - 1{x1 = x2}        x1, x2 from P, independent

Brier-n takes the first n tokens as one outcome. BrierLM is 100 times the geometric mean of Brier-1 to Brier-4.
"""

import math

import torch
from torch import Tensor

MAX_NGRAM = 4  # longest n-gram of BrierLM


def brier(sample_a: Tensor, sample_b: Tensor, target: Tensor) -> Tensor:
    """Unbiased estimates of Brier-1 to Brier-n from two independent samples.

    Args:
        sample_a, sample_b, target: token ids (..., n).

    Returns:
        (..., n), in [-1, 2]; the mean over positions is the score.
    """
    return brier_of_samples(torch.stack([sample_a, sample_b]), target)


def brier_of_samples(samples: Tensor, target: Tensor) -> Tensor:
    """The same from N samples (N, ..., n): unbiased, with less variance for larger N."""
    accuracy, collision = accuracy_and_collision(samples, target)
    return 2 * accuracy - collision


def accuracy_and_collision(samples: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Unbiased P(y), over all samples, and Σ P(x)², over all pairs of them, for n-grams: (..., n) and (..., n)."""
    count, n = len(samples), target.shape[-1]
    if count < 2 or n > MAX_NGRAM:
        raise ValueError(f"needs at least 2 samples of at most {MAX_NGRAM} tokens, not {count} of {n}")
    accuracy = _equal_ngrams(samples, target).mean(0)
    return accuracy, _equal_ngrams(*pairs(samples)).mean(0)


def pairs(samples: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of different samples: (N, ...) → (N·(N-1)/2, ...) twice."""
    left, right = torch.combinations(torch.arange(len(samples), device=samples.device)).unbind(-1)
    return samples[left], samples[right]


def _equal_ngrams(left: Tensor, right: Tensor) -> Tensor:
    """1 where the first 1, 2, ... n tokens are all equal, else 0."""
    return (left == right).cumprod(-1).float()


def brier_lm(scores: Tensor) -> float | None:
    """100 times the geometric mean of mean Brier-1 to Brier-4; None if one of them is not positive."""
    if len(scores) != MAX_NGRAM:
        raise ValueError(f"BrierLM needs Brier-1 to Brier-{MAX_NGRAM}, not {len(scores)} scores")
    if bool((scores <= 0).any()):
        return None
    return 100 * math.exp(scores.double().log().mean().item())
