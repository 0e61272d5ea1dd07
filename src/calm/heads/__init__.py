"""Generative heads (§3.2): from the backbone's hidden state to samples of the next latent.

A head has `loss(hidden, posterior, mask, generator)` and `sample(hidden, num_samples, generator)`, and nothing else
that others use.
"""

from calm.heads.diffusion import DiffusionHead
from calm.heads.energy import EnergyHead
from calm.heads.flow import FlowHead

HEADS = {"energy": EnergyHead, "flow": FlowHead, "diffusion": DiffusionHead}
Head = EnergyHead | FlowHead | DiffusionHead

__all__ = ["HEADS", "DiffusionHead", "EnergyHead", "FlowHead", "Head"]
