"""How many bytes a step of training needs, by formula: fp32 weights and states, and what the backward pass keeps.

trained weights   6 copies: weight, two moments, and a checkpoint's copy of all three
frozen weights    2 copies: weight, and the checkpoint's
a checkpoint      goes into files one after the other, each of which is in memory while it is made
activations       a few vectors a position and layer, as counted below; what is computed with them, and the pieces in
                  which memory lies, take a fifth as much again (measured: docs/performance.md)
gradients         come while activations go: the larger of both counts; the words of an autoencoder, which it reads and
                  writes, get one from either end and then their sum
"""

from typing import Any

from torch import nn

from calm.config import RunConfig
from calm.models.autoencoder import ChunkAutoencoder
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import ChunkAutoencoderConfig
from calm.products import WIDE
from calm.train.checkpoint import LARGEST_FILE

NUMBER = 4  # bytes
AROUND = 1.2
# Bytes that libraries take for themselves: at the first step, and oneDNN for the code that it writes for each shape.
LIBRARIES = 32e6 + (70e6 if WIDE else 0)


def training_memory(model: nn.Module, config: RunConfig, rows: float, processes: int = 1) -> float:
    """Bytes of one of so many processes, when it computes `rows` rows at once."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    states = NUMBER * (6 * trained + 2 * frozen) / processes
    file = min(LARGEST_FILE, NUMBER * (3 * trained + frozen) / processes)
    gradients = trained
    length, size = config.data.sequence_length, config.data.chunk_size
    if isinstance(model, ChunkAutoencoder):
        gradients += 2 * model.embedding.weight.numel()
        kept = (length + size) * _autoencoder_token(model.config)
    elif isinstance(model, CalmForCausalLM):
        kept = length // size * _calm_position(model, config.train.gradient_checkpointing)
    else:
        backbone: Any = model.config
        kept = (length + size) * (_backbone(backbone, config.train.gradient_checkpointing) + 3 * backbone.vocab_size)
    number = NUMBER if config.train.precision == "fp32" else 2
    return states + file + max(AROUND * number * rows * kept, NUMBER * gradients / processes) + LIBRARIES


def _autoencoder_token(config: ChunkAutoencoderConfig) -> float:
    """Numbers kept for a token."""
    layers = config.num_encoder_layers + config.num_decoder_layers
    return (4 * config.hidden_size + 6 * config.intermediate_size) * (1 + layers / 2)


def _backbone(config: Any, checkpointing: bool) -> float:
    """Numbers kept for a position."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = 14 * hidden + 5 * wide
    return layers * hidden + layer if checkpointing else layers * layer


def _calm_position(model: CalmForCausalLM, checkpointing: bool) -> float:
    """Numbers kept for a chunk: embedding, backbone, N samples through the head, and the loss on them."""
    config = model.config
    hidden, latent = config.hidden_size, config.latent_size
    embedding = (config.chunk_size + 6) * hidden if config.model_input != "continuous" else latent
    if config.is_chain:
        word, words = config.autoencoder_config.hidden_size, config.vocab_size  # a layer keeps 6 vectors of 8/3 words
        head = config.chunk_size * ((16 * config.num_head_layers + config.chunk_size + 4) * word + 3 * words)
    else:
        head = config.num_model_samples * ((13 * config.num_head_layers + 6) * hidden + 6 * latent)
    return embedding + _backbone(config.backbone_config, checkpointing) + head
