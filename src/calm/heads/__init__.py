"""Generative heads (§3.2): from the backbone's hidden state to samples of the next latent.

A head has `loss(hidden, posterior, mask, generator)` and `sample(hidden, num_samples, generator)`, and nothing else
that others use.
"""

from calm.heads.diffusion import DiffusionHead
from calm.heads.energy import EnergyHead
from calm.heads.flow import FlowHead
from calm.heads.mean_flow import MeanFlowHead

HEADS = {"energy": EnergyHead, "flow": FlowHead, "mean-flow": MeanFlowHead, "diffusion": DiffusionHead}
Head = EnergyHead | FlowHead | MeanFlowHead | DiffusionHead

__all__ = ["HEADS", "DiffusionHead", "EnergyHead", "FlowHead", "Head", "MeanFlowHead"]
