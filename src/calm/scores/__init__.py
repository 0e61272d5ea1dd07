"""Losses and metrics as pure functions of tensors."""

from calm.scores.brier import accuracy_and_collision, brier, brier_lm, brier_of_samples
from calm.scores.energy import energy_loss, energy_terms

__all__ = ["accuracy_and_collision", "brier", "brier_lm", "brier_of_samples", "energy_loss", "energy_terms"]
