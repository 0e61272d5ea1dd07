"""Generative heads (§3.2): from the backbone's hidden state to samples of the next latent.

A head has `loss(hidden, posterior, mask, generator)` and `sample(hidden, num_samples, generator)`, and nothing else
that others use; the variational head, whose loss is one of tokens, has `recognise` in the place of `loss`.
"""

from calm.heads.diffusion import DiffusionHead
from calm.heads.energy import EnergyHead
from calm.heads.flow import FlowHead
from calm.heads.mean_flow import MeanFlowHead
from calm.heads.variational import VariationalHead

HEADS = {
    "energy": EnergyHead,
    "flow": FlowHead,
    "mean-flow": MeanFlowHead,
    "diffusion": DiffusionHead,
    "variational": VariationalHead,
}
Head = EnergyHead | FlowHead | MeanFlowHead | DiffusionHead | VariationalHead

__all__ = ["HEADS", "DiffusionHead", "EnergyHead", "FlowHead", "Head", "MeanFlowHead", "VariationalHead"]
