"""Estimated memory of a training step: fp32 weights and optimizer states, and what the backward pass keeps.

On a CPU:

trained weights   6 copies: weight, two moments, and a checkpoint's copy of all three
frozen weights    2 copies: weight, and the checkpoint's
a checkpoint      is written file by file, and each file is in memory while it is written
activations       a few vectors per position and layer, as counted below, and one slice of logits; temporaries and
                  fragmentation add a fifth (measured: docs/performance.md)
gradients         appear while activations are freed: the larger of both counts; the embedding of an autoencoder, which
                  is used at both ends, gets two gradients and their sum

On a GPU (an estimate: no GPU was available to measure it):

trained weights   4 copies, sharded: weight, two moments, gradient; a checkpoint's copy is in CPU memory
frozen weights    1 copy, whole in every process
accumulation      one more copy of the gradients, whole in every process
gathered weights  under FSDP the largest layer twice (it is prefetched) with its gradient, the groups that stay
                  gathered, and the fp32 gradient of the largest group while it is reduced
autocast          without FSDP in bf16, a copy of the weights for the backward pass
activations       as on a CPU, and one slice of logits
"""

from typing import Any

from torch import nn

from calm.autoencoder import Autoencoder
from calm.config import RunConfig
from calm.model import Calm
from calm.scores.vocabulary import GPU_ELEMENTS, SLICE_ELEMENTS
from calm.train.checkpoint import LARGEST_FILE

BYTES = 4
OVERHEAD = 1.2
LIBRARIES = 100e6  # bytes that libraries allocate, the code that they generate for each shape included


LOGITS = 2 * BYTES * GPU_ELEMENTS  # bytes of a slice of logits and their gradient
CUDA = 1e9  # bytes of a CUDA context and its libraries


def gpu_training_memory(model: Any, config: RunConfig, rows: float, processes: int = 1) -> float:
    """Bytes of one GPU, if each computes `rows` rows at once."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    shard_size = min(config.train.shard_size or processes, processes)
    number = BYTES if config.train.precision == "fp32" else 2
    copies = 0
    if processes > 1:
        sizes = {False: [0], True: [0]}
        for unit, reshard in model.fsdp_units():
            sizes[reshard].append(sum(p.numel() for p in unit.parameters()))
        root = trained - sum(map(sum, sizes.values()))
        copies = number * (3 * max(sizes[True]) + 2 * (sum(sizes[False]) + root))
        copies += BYTES * max(root, *sizes[True], *sizes[False])
    elif number == 2 and not config.train.gradient_checkpointing:
        copies = number * trained
    states = BYTES * (4 * trained / shard_size + frozen)
    if processes > 1 and config.train.accumulation > 1:
        states += BYTES * trained  # gradients are summed before they are reduced
    return states + copies + OVERHEAD * number * rows * _kept(model, config) + LOGITS + CUDA


def training_memory(model: nn.Module, config: RunConfig, rows: float, processes: int = 1) -> float:
    """Bytes of one process on a CPU, if each computes `rows` rows at once."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    shard_size = min(config.train.shard_size or processes, processes)
    states = BYTES * (6 * trained / shard_size + 2 * frozen)
    file = min(LARGEST_FILE, BYTES * (3 * trained / shard_size + frozen))
    gradients = trained
    if isinstance(model, Autoencoder):
        gradients += 2 * model.embedding.weight.numel()
    number = BYTES if config.train.precision == "fp32" else 2
    activations = OVERHEAD * number * rows * _kept(model, config) + 2 * BYTES * SLICE_ELEMENTS
    return states + file + max(activations, BYTES * gradients / shard_size) + LIBRARIES


def _kept(model: Any, config: RunConfig) -> float:
    """Numbers per row that the backward pass keeps."""
    length, size = config.data.sequence_length, config.data.chunk_size
    checkpointing = config.train.gradient_checkpointing
    if isinstance(model, Autoencoder):
        return (length + size) * _autoencoder_token(model.config)
    if isinstance(model, Calm):
        return length // size * _calm_position(model, checkpointing)
    return (length + size) * (_backbone_position(model.config, checkpointing) + model.head.activation_size())


def _autoencoder_token(config: Any) -> float:
    """Numbers kept per token."""
    layers = config.num_encoder_layers + config.num_decoder_layers
    return (4 * config.hidden_size + 6 * config.intermediate_size) * (1 + layers / 2)


def _backbone_position(config: Any, checkpointing: bool) -> float:
    """Numbers kept per position."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = 14 * hidden + 5 * wide
    return layers * hidden + layer if checkpointing else layers * layer


def _calm_position(model: Calm, checkpointing: bool) -> float:
    """Numbers kept per chunk: embedding, backbone, and head."""
    config = model.config
    embedding = (config.chunk_size + 6) * config.hidden_size
    embedding = embedding if config.model_input != "continuous" else config.latent_size
    return embedding + _backbone_position(config.backbone_config, checkpointing) + model.head.activation_size()
