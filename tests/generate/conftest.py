from typing import Any

import pytest
import torch

from calm.checkpoint import build_calm
from calm.hf import CalmConfig, CalmForCausalLM
from calm.model import Calm

BACKBONE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "initializer_range": 0.5,
}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 16, "initializer_range": 0.5}
VOCAB_SIZE, EOS, PAD = 40, 0, 1


def model_fields(chunk_size: int, backbone: dict[str, Any] = BACKBONE, **fields: Any) -> dict[str, Any]:
    """The config of a model with large random weights, so that its outputs differ."""
    sizes = {"vocab_size": VOCAB_SIZE, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    return {
        "backbone_config": {"model_type": "llama", "vocab_size": VOCAB_SIZE, **backbone},
        "autoencoder_config": {"chunk_size": chunk_size, "initializer_range": 0.5, **sizes},
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **fields,
    }


def build_model(chunk_size: int, backbone: dict[str, Any] = BACKBONE, **fields: Any) -> Calm:
    """A plain model, as `calm.checkpoint` loads it."""
    torch.manual_seed(0)
    return _with_latent_weights(build_calm(model_fields(chunk_size, backbone, **fields)))


def build_hf_model(chunk_size: int, backbone: dict[str, Any] = BACKBONE, **fields: Any) -> CalmForCausalLM:
    """The same as a class of transformers."""
    torch.manual_seed(0)
    return _with_latent_weights(CalmForCausalLM(CalmConfig(**model_fields(chunk_size, backbone, **fields))))


def _with_latent_weights(model: Any) -> Any:
    if model.config.head == "energy":
        torch.nn.init.normal_(model.head.latent.weight)  # initialized to 0: every sample would be the same
    return model.eval()


@pytest.fixture
def model() -> Calm:
    return build_model(2)
