import pytest
import torch

from calm.models.calm import CalmForCausalLM
from calm.models.configuration import CalmConfig

BACKBONE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "initializer_range": 0.5,
}
END, FILL = 0, 1


def make(chunk_size: int, backbone=BACKBONE, **fields) -> CalmForCausalLM:
    """A model with large random weights, so that its texts differ."""
    torch.manual_seed(0)
    inner = {"vocab_size": 40, "chunk_size": chunk_size, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    config = CalmConfig(backbone, {**inner, "initializer_range": 0.5}, eos_token_id=END, pad_token_id=FILL, **fields)
    model = CalmForCausalLM(config).eval()
    if config.head == "energy":
        torch.nn.init.normal_(model.head.latent.weight)
    return model


@pytest.fixture
def model() -> CalmForCausalLM:
    return make(2)
