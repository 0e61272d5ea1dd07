"""Matrices in eight bits for generation on CPUs: a step of a single text reads every weight once, and these are a
quarter as long.

Each row of a matrix has its own scale; what meets it is rounded, too, by a scale that is found when it comes and that
all rows of a batch share. So texts that are written together are no longer independent to the last digit: a server
does not use it. Words and norms stay as they are. The effect on BrierLM is in docs/performance.md.
"""

import warnings

from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.ao.quantization.qconfig import per_channel_dynamic_qconfig

from calm.errors import UserError
from calm.heads import ChainHead
from calm.linear import change_layers
from calm.models.network import CalmNetwork


def to_int8(model: nn.Module) -> None:
    """Change the linear layers of a model that is not trained any more."""
    if model.device.type != "cpu":
        raise UserError(f"int8 is for CPUs, and the model is on {model.device.type}; leave it out")
    model.requires_grad_(False)
    change_layers(model, nn.Linear)  # of plain layers it knows how
    parts: list[nn.Module] = [model]
    if isinstance(model, CalmNetwork):
        head = model.head.layers if isinstance(model.head, ChainHead) else model.head  # the rest of it is taken apart
        parts = [model.backbone, model.chunk_embedding, head]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that another package will take over
        for part in parts:
            quantize_dynamic(part, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)
