"""Dynamic int8 quantization: nearly the same numbers, the same interface."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.nn.quantized import dynamic
from transformers import Qwen2Config, Qwen2ForCausalLM

from calm import cpu
from calm.autoencoder import SwiGLULayer
from calm.checkpoint import load_calm, resolve_model_dir
from calm.cpu import modules
from calm.cpu.modules import NativeLlama
from calm.errors import UserError
from calm.generate.engine import Engine, Sequence
from calm.generate.sampler import SamplingParams
from calm.generate.text import TextGenerator
from calm.hf import HFTransformer
from calm.llama import Llama, LlamaConfig
from calm.model import Calm, PlainCalmConfig
from calm.transformer import Transformer

BUNDLED = resolve_model_dir(Path("bundled"))
BACKBONE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
AUTOENCODER = {"vocab_size": 40, "chunk_size": 2, "latent_size": 4, "hidden_size": 8, "intermediate_size": 16}
KINDS = ["transformer", "other transformer", "energy", "chain", "probit", "diffusion", "flow", "mean-flow"]


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "transformer":
        return Transformer(LlamaConfig(**BACKBONE)).eval()
    if kind == "other transformer":
        return HFTransformer(Qwen2ForCausalLM(Qwen2Config(**BACKBONE, num_key_value_heads=2)).eval())
    return Calm(PlainCalmConfig(BACKBONE, AUTOENCODER, head=kind)).eval()


def test_hidden_states_stay_close():
    plain, quantized = (load_calm(BUNDLED) for _ in range(2))
    cpu.optimize(quantized, int8=True)
    shape = (2, 4, plain.chunk_size)
    chunks = torch.randint(3, plain.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, rounded = plain.hidden_states(chunks), quantized.hidden_states(chunks)
    assert not torch.equal(exact, rounded)
    # steps of 1/127 of a range, for weights and for activations, through four layers: a few in a hundred
    assert (exact - rounded).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", ["new", "optimized for inference", "optimized for training"])
def test_linear_layers_of_the_backbone_are_quantized(kind, before):
    """Whether or not the model was used before; embeddings, norms, and the vocabulary projection stay in fp32."""
    model = make_model(kind)
    if before != "new":
        cpu.optimize(model, training="training" in before)
    parameters = sum(p.numel() for p in model.parameters())
    cpu.optimize(model, int8=True)
    assert sum(p.numel() for p in model.parameters()) < parameters
    backbone = model.model.base_model if kind == "other transformer" else model.backbone
    layers = [part for name, part in backbone.layers.named_modules() if name.endswith("_proj")]
    assert len(layers) == 7 * BACKBONE["num_hidden_layers"]
    assert all(type(layer) is dynamic.Linear for layer in layers)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_models_generate_and_score(kind):
    model = make_model(kind)
    cpu.optimize(model, int8=True)
    engine, sequence = Engine(model, -1, 1), Sequence([2, 3, 4, 5], 0, 8)
    engine.add([sequence])
    while engine.waiting or engine.running:
        engine.step()
    assert len(sequence.output_ids) == 8
    chunks = torch.randint(40, (2, 5, model.chunk_size))
    with torch.no_grad():
        assert model(chunks)["loss"].isfinite()


@torch.no_grad()
def test_quantized_layers_are_left_to_torch(native_calls):
    torch.manual_seed(0)
    model, x = nn.Sequential(SwiGLULayer(37, 53, 0.1)), torch.randn(1, 37)
    model.quantizable = lambda: [model]
    modules.prepare_decoding(model)
    expected = model(x)
    cpu.optimize(model, int8=True)
    del native_calls[:]
    torch.testing.assert_close(model(x), expected, rtol=0.1, atol=0.5)  # two digits
    assert not native_calls


@torch.no_grad()
def test_decoding_uses_quantized_layers(native_calls):
    """One sequence, as all rows of a batch share a scale."""
    torch.manual_seed(0)
    model = Transformer(LlamaConfig(**BACKBONE)).eval()
    cpu.optimize(model, int8=True)
    ours = model.backbone
    assert type(ours) is NativeLlama
    assert ours.weights is None
    plain = copy.copy(ours)
    plain.__class__ = Llama
    embeddings, results = torch.randn(1, 6, BACKBONE["hidden_size"]), []
    for backbone in (ours, plain):
        cache = backbone.new_cache()
        backbone(embeddings[:, :5], cache=cache)
        results.append(backbone(embeddings[:, 5:], cache=cache))
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)  # a last digit may be rounded the other way
    assert not native_calls


def test_text_generator():
    generator = TextGenerator(BUNDLED, int8=True)
    prompt = generator.tokenizer.encode("And God said")
    deltas = list(generator.stream([prompt], SamplingParams(0.5), max_new_tokens=8))
    assert sum(len(delta.token_ids) for delta in deltas) == 8
    assert type(generator.model.backbone.layers[0].self_attn.q_proj) is dynamic.Linear
    assert getattr(generator.model.backbone, "weights", None) is None  # the native kernel reads fp32


def test_other_devices_are_refused():
    model = make_model("energy").to("meta")
    with pytest.raises(UserError, match="int8 is for CPUs, and the model is on meta"):
        cpu.optimize(model, int8=True)
