"""Generative heads (§3.2): from the backbone's hidden state to samples of the next latent.

A head has `loss(hidden, posterior, mask, generator)` and `sample(hidden, num_samples, generator)`, and nothing else
that others use. The chain head, which knows tokens instead of latents, has states of tokens in the place of both.
"""

from calm.heads.chain import ChainHead
from calm.heads.diffusion import DiffusionHead
from calm.heads.energy import EnergyHead
from calm.heads.flow import FlowHead
from calm.heads.mean_flow import MeanFlowHead

LATENT_HEADS = {
    "energy": EnergyHead,
    "flow": FlowHead,
    "mean-flow": MeanFlowHead,
    "diffusion": DiffusionHead,
}
LatentHead = EnergyHead | FlowHead | MeanFlowHead | DiffusionHead

__all__ = [
    "LATENT_HEADS",
    "ChainHead",
    "DiffusionHead",
    "EnergyHead",
    "FlowHead",
    "LatentHead",
    "MeanFlowHead",
]
