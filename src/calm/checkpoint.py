"""Model directories in the Hugging Face layout: config.json, safetensors, tokenizer, and model card.

Models are loaded without importing transformers, which takes seconds, unless they have one of its backbones. Invalid
directories raise a one-sentence `UserError`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from calm.autoencoder import Autoencoder, AutoencoderConfig
from calm.errors import UserError, one_line
from calm.files import write_atomic, write_json
from calm.llama import LlamaConfig
from calm.model import Calm, PlainCalmConfig
from calm.transformer import Transformer

BUNDLED = "bundled"
CONFIG_FILE, CARD_FILE = "config.json", "README.md"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
KINDS = {AutoencoderConfig.model_type: "an autoencoder", PlainCalmConfig.model_type: "a CALM language model"}
RENAMED_WEIGHTS = {"head.own_words.weight": "head.lm_head.weight"}  # of version 0.1.0.dev0
MAX_SHARD_SIZE = 5 * 2**30  # bytes per weight file


# ------------------------------------------------------------------------------------------------------- directories


def resolve_model_dir(name: Path) -> Path:
    """The directory of a model; `bundled` names the model that ships with the package."""
    return Path(str(files("calm") / BUNDLED)) if str(name) == BUNDLED and not name.exists() else name


def model_type(directory: Path) -> str:
    """The `model_type` of a model directory."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        hint = f"; its model is in {directory / 'model'}" if (directory / "model" / CONFIG_FILE).exists() else ""
        raise UserError(f"{directory} is not a model directory (it has no {CONFIG_FILE}){hint}")
    return str(field_of(read_json(path, f"the model in {directory} cannot be read: "), "model_type", path))


class ModelInfo(NamedTuple):
    """The sizes of a language model, from its config.json alone."""

    chunk_size: int | None  # None: a Transformer, which predicts one token at a time
    vocab_size: int
    max_tokens: int | None  # the smaller of its maximum positions and its attention window


def read_info(directory: Path) -> ModelInfo:
    """Sizes of a saved language model."""
    kind, fields = model_type(directory), read_json(directory / CONFIG_FILE)
    if kind in KINDS:
        _check_kind(directory, PlainCalmConfig.model_type)
    with _config_errors(directory):
        chunk_size = fields["autoencoder_config"]["chunk_size"] if kind in KINDS else None
        backbone = backbone_config(fields["backbone_config"] if kind in KINDS else fields)
        vocab_size = fields["autoencoder_config"]["vocab_size"] if kind in KINDS else backbone.vocab_size
        limits = (getattr(backbone, name, None) for name in ("max_position_embeddings", "sliding_window"))
        max_tokens = min((limit * (chunk_size or 1) for limit in limits if limit), default=None)
    return ModelInfo(chunk_size, vocab_size, max_tokens)


def backbone_config(fields: dict[str, Any]) -> Any:
    """The config of our Llama, or of another backbone of transformers."""
    if LlamaConfig.describes(fields):
        return LlamaConfig(**fields)
    from transformers import AutoConfig

    return AutoConfig.for_model(**fields).get_text_config()


def read_json(path: Path, context: str = "") -> dict[str, Any]:
    """A JSON object from a file; `context` begins the error message."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{context}{path.name} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{context}{path.name} should hold an object, not a {type(content).__name__}")
    return content


def field_of(fields: dict[str, Any], name: str, place: Path) -> Any:
    if name not in fields:
        raise UserError(f"{place}: the field {name!r} is missing")
    return fields[name]


# ----------------------------------------------------------------------------------------------------------- loading


def load_language_model(directory: Path) -> Any:
    """Load a CALM model or a Transformer, in fp32."""
    return load_calm(directory) if model_type(directory) in KINDS else load_transformer(directory)


def load_autoencoder(directory: Path) -> Autoencoder:
    _check_kind(directory, AutoencoderConfig.model_type)
    with _config_errors(directory):
        known, fields = AutoencoderConfig.model_fields, read_json(directory / CONFIG_FILE)
        check_layers(fields, directory)
        with no_init():
            model = Autoencoder(AutoencoderConfig(**{name: fields[name] for name in known if name in fields}))
    return _load_weights(model, directory)


def load_calm(directory: Path) -> Calm:
    _check_kind(directory, PlainCalmConfig.model_type)
    with _config_errors(directory), no_init():
        fields = read_json(directory / CONFIG_FILE)
        check_layers(fields, directory)
        model = build_calm(fields)
    return _load_weights(model, directory)


def build_calm(fields: dict[str, Any]) -> Calm:
    """The model that a config.json describes, with any backbone."""
    backbone_fields = fields["backbone_config"]
    if LlamaConfig.describes(backbone_fields):
        return Calm(PlainCalmConfig(**fields))
    from calm.hf import build_backbone

    backbone = build_backbone(backbone_fields)
    return Calm(PlainCalmConfig(**{**fields, "backbone_config": backbone.config}), backbone)


def load_transformer(directory: Path) -> Any:
    """Load a language model with a softmax over tokens: a Llama, or any other that transformers supports."""
    if (kind := model_type(directory)) in KINDS:
        raise UserError(f"{directory} holds {KINDS[kind]}, not a Transformer with a softmax over tokens")
    fields = read_json(directory / CONFIG_FILE)
    if not LlamaConfig.describes(fields):
        from calm.hf import load_hf_transformer

        return load_hf_transformer(directory)
    check_layers(fields, directory)
    with _config_errors(directory), no_init():
        model = Transformer(LlamaConfig(**fields))
    return _load_weights(model, directory)


def _check_kind(directory: Path, expected: str) -> None:
    if (kind := model_type(directory)) != expected:
        raise UserError(f"{directory} holds {KINDS.get(kind, f'a model of type {kind!r}')}, not {KINDS[expected]}")


@contextmanager
def _config_errors(directory: Path) -> Iterator[None]:
    """Convert errors caused by a config.json to `UserError`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"the model in {directory} cannot be read: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise UserError(f"the model in {directory} cannot be read: {place}: {problem['msg']}") from error
    except KeyError as error:
        raise UserError(f"the model in {directory} cannot be read: {CONFIG_FILE} has no field {error}") from error
    except (AttributeError, TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        kind = type(error).__name__
        raise UserError(f"the model in {directory} cannot be read: {kind}: {one_line(error)}") from error


class no_init(TorchFunctionMode):  # noqa: N801  # used like torch.no_grad
    """Leaves modules built in this context uninitialized, because their weights are loaded next."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if getattr(func, "__module__", None) == nn.init.__name__ else func(*args, **(kwargs or {}))


def _load_weights(model: Any, directory: Path) -> Any:
    """Load the weights of a directory, which must be exactly those of the model; in eval mode."""
    weights = {RENAMED_WEIGHTS.get(name, name): value for name, value in read_weights(directory).items()}
    expected = model.state_dict()
    tied = getattr(model.config, "tie_word_embeddings", False)
    if tied and "lm_head.weight" not in weights and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights = {name: value for name, value in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    wrong = [name for name in (*expected, *weights) if (name in expected) != (name in weights)]
    wrong += [name for name in expected if name in weights and expected[name].shape != weights[name].shape]
    if wrong:
        raise UserError(f"the weights in {directory} do not fit their config.json: {', '.join(wrong[:3])}")
    check_finite(weights, directory)
    model.load_state_dict(weights, assign=not tied)
    return model.requires_grad_(True).eval()


def check_layers(fields: dict[str, Any], directory: Path, tensors: int | None = None) -> None:
    """Raise UserError if a config.json has more layers than there are tensors: building them would need all memory."""
    tensors = sum(map(_count_tensors, weight_files(directory))) if tensors is None else tensors
    for name, value in fields.items():
        if isinstance(value, dict):
            check_layers(value, directory, tensors)
        elif name.endswith(("layer", "layers")) and isinstance(value, int) and value > tensors:
            raise UserError(
                f"the weights in {directory} do not fit their config.json: {name} is {value:,}, but there are only "
                f"{tensors:,} tensors"
            )


def check_finite(weights: Mapping[str, Tensor], directory: Path) -> None:
    """Raise UserError if a weight is NaN or infinite: the model would generate meaningless text."""
    for name, value in weights.items():
        # The sum takes a tenth of the time of `isfinite`; that of finite numbers may overflow.
        if value.is_floating_point() and not value.sum().isfinite() and not value.isfinite().all():
            raise UserError(
                f"the weights in {directory} are not finite: {name} has NaN or infinite values; use another checkpoint "
                "of the run, or download the model again"
            )


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a directory."""
    for name in WEIGHT_FILES:
        if (index := directory / f"{name}.index.json").exists():
            weight_map = field_of(read_json(index), "weight_map", index)
            shards = list(weight_map.values()) if isinstance(weight_map, dict) else [weight_map]
            for shard in shards:
                if not isinstance(shard, str) or Path(shard).name != shard:
                    raise UserError(f"{index} should name files in its directory, not {shard!r:.100}")
            return [directory / shard for shard in sorted(set(shards))]
        if (directory / name).exists():
            return [directory / name]
    raise UserError(f"{directory} holds no weights: neither {' nor '.join(WEIGHT_FILES)}")


def read_weights(directory: Path) -> dict[str, Tensor]:
    """A state dict in fp32, from one or more files: safetensors, or pickles, which are loaded with weights_only."""
    weights: dict[str, Tensor] = {}
    for path in weight_files(directory):
        weights |= _read_file(path)
    return weights


def _count_tensors(path: Path) -> int:
    if path.suffix != ".safetensors":
        return len(_read_file(path))
    with _file_errors(path), safe_open(path, "pt") as file:
        return len(file.keys())


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Convert errors caused by a weight file to `UserError`."""
    try:
        yield
    except (OSError, SafetensorError, UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def _read_file(path: Path) -> dict[str, Tensor]:
    with _file_errors(path):
        is_safetensors = path.suffix == ".safetensors"
        weights = load_file(path) if is_safetensors else torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{path} is not a state dict of tensors")
    return {name: value.float() for name, value in weights.items()}


# ------------------------------------------------------------------------------------------------------------ saving


def save_model(model: Any, directory: Path, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write a directory that this package and transformers' Auto classes can load.

    Args:
        model: an autoencoder, a CALM model, or a Transformer.
        directory: written in place, not atomically; write to another name and rename it if that matters.
        state_dict: the weights, if they were gathered from several processes.
    """
    from huggingface_hub import save_torch_state_dict

    directory.mkdir(parents=True, exist_ok=True)
    weights = model.state_dict() if state_dict is None else state_dict
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    write_json(directory / CONFIG_FILE, {**model.config_dict(), "dtype": dtype})
    tied = ["lm_head.weight"]  # if tied to the token embedding, only the embedding is saved, as transformers does
    save_torch_state_dict(_separated(weights), directory, max_shard_size=MAX_SHARD_SIZE, shared_tensors_to_discard=tied)
    if isinstance(model, Calm):
        write_card(model, directory)


def _separated(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies the tensors that are views of larger ones, such as weights fused by `calm.cpu`; tied ones stay tied."""
    parts = [value for value in weights.values() if value.untyped_storage().nbytes() != value.nbytes]
    copies = {value.data_ptr(): value.clone() for value in parts}
    return {name: copies.get(value.data_ptr(), value) for name, value in weights.items()}


def write_card(model: Any, directory: Path) -> None:
    """Write a model card, unless there is one."""
    if not (directory / CARD_FILE).exists():
        parameters = sum(parameter.numel() for parameter in model.parameters())
        write_atomic(directory / CARD_FILE, model_card(model.config, parameters).encode())


def model_card(config: Any, parameters: int) -> str:
    """The README.md of a CALM model: what it is, and how to load it."""
    backbone = config.backbone_config
    return f"""---
library_name: calm-lm
pipeline_tag: text-generation
tags: [calm, continuous-autoregressive]
---

# A continuous autoregressive language model

Each step of its backbone predicts the next {config.chunk_size} tokens.

| | |
|---|---|
| parameters, autoencoder included | {parameters:,} |
| backbone | {backbone.model_type}, {backbone.num_hidden_layers} layers of {backbone.hidden_size} |
| head | {config.head}, {config.num_head_layers} blocks |
| model input | {config.model_input} |
| vocabulary | {config.vocab_size:,} |
| tokens per chunk (K) | {config.chunk_size} |

```python
import calm
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIRECTORY_OR_NAME")
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY_OR_NAME")
```

`run.json`, if present, holds the configuration, versions, and scores of the run that produced the model.
"""
