"""Dynamic int8 quantization of linear layers: a decoding step reads every weight once, and these are a quarter as long.

Each row of a matrix has its own scale. Activations are quantized, too, with one scale for the whole batch: sequences
that are generated together are no longer independent to the last digit, so the server does not use it. Embeddings and
norms stay in fp32. docs/performance.md has the effect on BrierLM.
"""

import warnings
from typing import Any

from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.ao.quantization.qconfig import per_channel_dynamic_qconfig

from calm.cpu.linear import FastLinear
from calm.cpu.modules import replace_modules
from calm.cpu.onednn import OneDNNLinear


def quantize(model: Any) -> None:
    """Quantize the linear layers of a model that is not trained any more, in place."""
    model.requires_grad_(False)
    replace_modules(model, dict.fromkeys((FastLinear, OneDNNLinear), nn.Linear))  # torch quantizes no others
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that another package will take over
        for part in model.quantizable():
            quantize_dynamic(part, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)
