"""Generation: chunk by chunk, at any temperature. The algorithms of §5 take any black box that can be sampled from."""

from calm.generate.mixture import LogitsProcessor, sample_mixture
from calm.generate.rejection import expected_draws, sample_at_temperature
from calm.generate.temperature import Candidates, SamplingStats, sample_from_candidates, sample_token_by_token

__all__ = [
    "Candidates",
    "LogitsProcessor",
    "SamplingStats",
    "expected_draws",
    "sample_at_temperature",
    "sample_from_candidates",
    "sample_mixture",
    "sample_token_by_token",
]
