"""Generative heads (§3.2): from the backbone's hidden state to the next chunk. `base.py` defines the contract."""

from calm.heads.base import Head, HeadConfig, HeadCost, LatentProposals, Proposals, VectorHead
from calm.heads.chain import ChainHead
from calm.heads.diffusion import DiffusionHead
from calm.heads.energy import EnergyHead
from calm.heads.flow import FlowHead
from calm.heads.mean_flow import MeanFlowHead
from calm.heads.probit import ProbitHead

HEADS: dict[str, type[Head]] = {
    "energy": EnergyHead,
    "flow": FlowHead,
    "mean-flow": MeanFlowHead,
    "diffusion": DiffusionHead,
    "chain": ChainHead,
    "probit": ProbitHead,
}

__all__ = [
    "HEADS",
    "ChainHead",
    "DiffusionHead",
    "EnergyHead",
    "FlowHead",
    "Head",
    "HeadConfig",
    "HeadCost",
    "LatentProposals",
    "MeanFlowHead",
    "ProbitHead",
    "Proposals",
    "VectorHead",
]
