"""Text from models: chunk by chunk, at any temperature. The algorithms take any black box that can be drawn from."""

from calm.sampling.candidates import Candidates
from calm.sampling.mixture import Cut, mixture_nats, sample_mixture
from calm.sampling.rejection import expected_draws, sample_at_temperature
from calm.sampling.temperature import Cost, sample_from_candidates, sample_token_by_token

__all__ = [
    "Candidates",
    "Cost",
    "Cut",
    "expected_draws",
    "mixture_nats",
    "sample_at_temperature",
    "sample_from_candidates",
    "sample_mixture",
    "sample_token_by_token",
]
