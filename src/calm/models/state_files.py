"""State dicts as Hugging Face writes them: one file or many, safetensors or a pickle that is read with weights_only."""

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from calm.errors import UserError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def read_object(path: Path, because: str = "") -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{because}{path.name} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f"{because}{path.name} should hold an object, not a {type(found).__name__}")
    return found


def field_of(fields: dict[str, Any], name: str, place: Path) -> Any:
    if name not in fields:
        raise UserError(f"{place}: the field {name!r} is missing")
    return fields[name]


def read_weights(directory: Path) -> dict[str, Tensor]:
    """One file or many, safetensors or a pickled state dict, which is read with weights_only."""
    for name in WEIGHTS:
        if (index := directory / f"{name}.index.json").exists():
            files = sorted(set(field_of(read_object(index), "weight_map", directory).values()))
        elif (directory / name).exists():
            files = [name]
        else:
            continue
        weights: dict[str, Tensor] = {}
        for file in files:
            weights |= _read_file(directory / Path(file).name)
        return weights
    raise UserError(f"{directory} holds no weights: neither {' nor '.join(WEIGHTS)}")


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            found = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{path} is not a state dict of tensors")
    return {name: value.float() for name, value in found.items()}
