"""Devices and dtypes."""

import pytest
import torch
from torch import nn

from calm.cli import main
from calm.config import load_config
from calm.distributed import World, move_model, resolve_device, resolve_dtype
from calm.errors import ConfigError
from calm.llama import Llama, LlamaConfig
from calm.noise import RowNoise
from calm.train.distributed import initialize
from calm.train.speed import Speed, measured_peak, nominal_peak
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
    assert nominal_peak(name, torch.float32) == (None if peak is None else peak / 2)


def test_the_peak_is_that_of_the_layer_that_training_uses():
    calls = []

    def optimize(model: nn.Module) -> None:
        model.register_forward_hook(lambda *_: calls.append(1))

    assert measured_peak(CPU, torch.float32, optimize, 0.0) > 0
    assert len(calls) == 2  # one to warm up


def test_mfu_is_relative_to_the_nominal_peak(monkeypatch):
    """What gradient checkpointing computes again does not count."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    flops = []
    for checkpointing in (False, True):
        speed = Speed(8, World(0, 1, torch.device("cuda", 0)), torch.bfloat16, 1.0)
        model = described_model(load_config("toy-calm"), 50)
        model.backbone.gradient_checkpointing = checkpointing
        part = {"chunks": torch.ones(2, 4, model.chunk_size, dtype=torch.long), "noise": RowNoise([0, 1])}
        speed.count_flops(model, [part], torch.autocast("cpu", enabled=False))
        speed.since_last(0)
        found = speed.since_last(1)
        assert found["mfu"] == pytest.approx(found["share_of_peak"] / 312e12)
        flops.append(speed.flops)
    assert flops[0] == flops[1] > 0


def test_devices(monkeypatch):
    with pytest.raises(ConfigError, match="must be auto, cpu, cuda, or cuda:N, not 'mps'"):
        resolve_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device() == CPU
    with pytest.raises(ConfigError, match="device cuda is not available: torch .* finds no CUDA device; use cpu"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    precision = torch.get_float32_matmul_precision()
    try:
        assert resolve_device("cpu") == CPU
        assert torch.get_float32_matmul_precision() == precision
        assert resolve_device() == torch.device("cuda", 0)
        assert torch.get_float32_matmul_precision() == "high"
        assert resolve_device("cuda:1") == torch.device("cuda", 1)
        with pytest.raises(ConfigError, match="device cuda:2 is not available: this machine has 2 CUDA devices"):
            resolve_device("cuda:2")
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize(
    "arguments", [["generate", "bundled"], ["evaluate", "bundled", "--data", "x"], ["serve", "bundled"]]
)
def test_dtypes_and_devices_of_commands(arguments, capsys, monkeypatch):
    """One line, and no traceback."""
    for option, message in (
        (["--dtype", "fp16"], "'fp16' is not one of"),
        (["--device", "tpu"], "device must be auto"),
    ):
        monkeypatch.setattr("sys.argv", ["calm", *arguments, *option])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
