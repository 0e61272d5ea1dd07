"""Benchmarks of `calm bench`: training, generation and evaluation relative to the limits of the hardware."""
