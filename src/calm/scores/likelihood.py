"""Likelihood of a mixture: N latents, each with a softmax per token, make an explicit distribution over chunks."""

import torch
from torch import Tensor


def mixture_cross_entropy(losses: Tensor) -> Tensor:
    """From the cross-entropy of a chunk's tokens under each of N latents to that under their mixture.

    The sum over the first k tokens is -log of the mean over latents: in expectation an upper bound of the model's own
    negative log-likelihood, since -log is convex, and tighter for larger N.

    Args:
        losses: nats per token under each latent (N, ..., K).

    Returns:
        Nats per token (..., K), in fp64.
    """
    number = torch.tensor(float(len(losses)))
    joint = number.log() - torch.logsumexp(-losses.double().cumsum(-1), dim=0)  # (..., K): of the first k tokens
    return joint.diff(dim=-1, prepend=torch.zeros_like(joint[..., :1]))
