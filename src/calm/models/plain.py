"""Models that only write, read without transformers: the library's import takes longer than all that is done here.

A saved CALM model on a plain Llama is built from the same networks as in training; whatever else a directory holds, or
whatever is wrong with it, is left to loading.py.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from calm.errors import UserError
from calm.models.codec import Codec
from calm.models.fields import AutoencoderFields, CalmFields
from calm.models.llama import Llama
from calm.models.network import CalmNetwork
from calm.models.state_files import read_object, read_weights


class PlainAutoencoderConfig(AutoencoderFields, SimpleNamespace):
    pass


class PlainConfig(CalmFields, SimpleNamespace):
    def autoencoder_fields(self, given: dict[str, Any]) -> PlainAutoencoderConfig:
        return PlainAutoencoderConfig(**given)

    def backbone_fields(self, given: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(**given)


class PlainAutoencoder(Codec):
    def __init__(self, config: AutoencoderFields):
        super().__init__()
        self.config = config
        self.add_parts()


class PlainCalm(CalmNetwork):
    def __init__(self, config: CalmFields):
        super().__init__()
        self.config, backbone = config, config.backbone_config
        self.add_parts(Llama(backbone), nn.Embedding(backbone.vocab_size, backbone.hidden_size))
        self.autoencoder = PlainAutoencoder(config.autoencoder_config)

    @property
    def device(self) -> torch.device:
        return self.autoencoder.embedding.weight.device


class Unset(TorchFunctionMode):
    """Modules that are made here get no numbers: others take their place at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if getattr(func, "__module__", None) == nn.init.__name__ else func(*args, **(kwargs or {}))


def read_plain(directory: Path) -> PlainCalm | None:
    """The model in a directory, in fp32, or nothing where it takes more than is here to read it or to say why not."""
    try:
        fields = read_object(directory / "config.json")
        if fields.get("model_type") != CalmFields.model_type or not Llama.describes(fields["backbone_config"]):
            return None
        with Unset():
            model = PlainCalm(PlainConfig(**fields))
        model.load_state_dict(read_weights(directory), assign=True)
    except (UserError, AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return None
    return model.requires_grad_(False).eval()
