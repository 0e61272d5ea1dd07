from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from calm.data.shards import PreparedData
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import CalmConfig

BACKBONE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="session")
def models(prepared, tmp_path_factory) -> Path:
    """A directory with saved models of random weights: calm-1 to calm-4, softmax and autoencoder."""
    directory = tmp_path_factory.mktemp("models")
    tokenizer = PreparedData(prepared).tokenizer
    inner = {"vocab_size": tokenizer.vocab_size, "latent_size": 4, "hidden_size": 8, "intermediate_size": 8}
    for chunk_size in (1, 2, 3, 4):
        torch.manual_seed(chunk_size)
        config = CalmConfig(
            {**BACKBONE, "initializer_range": 0.5}, {**inner, "chunk_size": chunk_size, "initializer_range": 0.5}
        )
        model = CalmForCausalLM(config)
        torch.nn.init.normal_(model.head.latent.weight)  # training begins at 0: a model that always says the same
        model.save_pretrained(directory / f"calm-{chunk_size}")
    model.autoencoder.save_pretrained(directory / "autoencoder")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=tokenizer.vocab_size, **{**BACKBONE, "max_position_embeddings": 128})
    LlamaForCausalLM(config).save_pretrained(directory / "softmax")
    for path in directory.iterdir():
        tokenizer.save(path)
    return directory
