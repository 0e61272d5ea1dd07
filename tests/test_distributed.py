"""Devices and dtypes."""

import pytest
import torch
from torch import nn

from calm.config import load_config
from calm.distributed import move_model, resolve_dtype
from calm.llama import Llama, LlamaConfig
from calm.train.distributed import initialize
from calm.train.speed import nominal_peak
from calm.train.stages import described_model

CPU = torch.device("cpu")


def test_buffers_keep_their_precision():
    """Rotary frequencies in bf16 would turn positions of some hundred by a radian."""
    from transformers import AutoConfig, AutoModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModel.from_config(AutoConfig.for_model("qwen2", vocab_size=20, num_key_value_heads=1, **sizes))
    frequencies = model.rotary_emb.inv_freq.clone()
    move_model(model, CPU, "bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize("real", [True, False])
def test_bf16_is_the_default_where_it_is_not_emulated(real, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: real or including_emulation)
    assert resolve_dtype("auto", torch.device("cuda", 0)) == (torch.bfloat16 if real else torch.float32)
    assert resolve_dtype("auto", CPU) == torch.float32


def test_tied_embeddings_stay_tied():
    config = load_config("toy-transformer", ["language_model.backbone.tie_word_embeddings=true"])
    with torch.device("meta"):
        model = described_model(config, 50)
    initialize(model, model.reset_parameters, CPU)
    assert model.lm_head.weight is model.embedding.weight
    assert len([name for name, _ in model.named_parameters() if "embed" in name or "lm_head" in name]) == 1


def test_the_residual_stream_is_fp32_under_autocast():
    """As in one process, also where FSDP gathers the embedding in bf16."""
    llama = Llama(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2))
    dtypes = []
    for layer in llama.layers:
        layer.register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
    x = nn.Embedding(5, 16).bfloat16()(torch.tensor([[1, 2, 3]]))
    with torch.autocast("cpu", torch.bfloat16):
        llama(x)
    assert dtypes == [torch.float32] * 2


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_nominal_peaks(name, peak):
    assert nominal_peak(name) == peak
