"""Measures of trained models, and of anything that can continue a text."""

from calm.evaluate.brier_lm import BrierLM, Score
from calm.evaluate.evaluation import evaluate_sampler

__all__ = ["BrierLM", "Score", "evaluate_sampler"]
