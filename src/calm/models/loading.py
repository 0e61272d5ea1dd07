"""Read a saved model; whatever is wrong with its directory is said in one sentence."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from calm.errors import UserError
from calm.linear import change_layers
from calm.models.autoencoder import ChunkAutoencoder
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import CalmConfig, ChunkAutoencoderConfig
from calm.models.directories import model_type

KINDS = {ChunkAutoencoderConfig.model_type: "an autoencoder", CalmConfig.model_type: "a CALM language model"}


def load_autoencoder(directory: Path) -> ChunkAutoencoder:
    return _load(directory, ChunkAutoencoder, ChunkAutoencoderConfig.model_type)


def load_calm(directory: Path) -> CalmForCausalLM:
    return _load(directory, CalmForCausalLM, CalmConfig.model_type)


def load_backbone(directory: Path) -> PreTrainedModel:
    """The Transformer of a pretrained language model; its output layer is left behind."""
    if (kind := model_type(directory)) in KINDS:
        raise UserError(f"{directory} holds {KINDS[kind]}, not a pretrained Transformer")
    return _read(directory, AutoModel, extra_allowed=True)


def load_softmax(directory: Path) -> PreTrainedModel:
    """A language model of transformers with a softmax over tokens."""
    if (kind := model_type(directory)) in KINDS:
        raise UserError(f"{directory} holds {KINDS[kind]}, not a Transformer with a softmax over tokens")
    return _read(directory, AutoModelForCausalLM)


def load_writing(directory: Path) -> CalmForCausalLM | PreTrainedModel:
    """A language model, ours or one with a softmax."""
    return load_calm(directory) if model_type(directory) in KINDS else load_softmax(directory)


def _load(directory: Path, cls: Any, kind: str) -> Any:
    if (found := model_type(directory)) != kind:
        raise UserError(f"{directory} holds {KINDS.get(found, f'a model of type {found!r}')}, not {KINDS[kind]}")
    return _read(directory, cls)


def _read(directory: Path, cls: Any, extra_allowed: bool = False) -> Any:
    """In fp32, whatever was saved: it may be trained."""
    try:
        model, found = cls.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # transformers and safetensors raise many kinds for a broken directory
        reason = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"the model in {directory} cannot be read: {reason}") from error
    kinds = ("missing_keys", "mismatched_keys", *(("unexpected_keys",) if not extra_allowed else ()))
    if wrong := [name for kind in kinds for name in found[kind]]:
        raise UserError(f"the weights in {directory} do not fit their config.json: {', '.join(map(str, wrong[:3]))}")
    change_layers(model)
    return model
