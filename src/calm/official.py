"""Converts the checkpoints that the authors of CALM published. The only file that knows their names.

The directory of a language model has the autoencoder's weights, but not its configuration, which is in a directory of
its own. Every key is accounted for: converted, known to be a copy or unused, or reported as an error.
"""

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calm.autoencoder import Autoencoder, AutoencoderConfig
from calm.checkpoint import check_layers, field_of, no_init, read_json, read_weights, save_model
from calm.data.tokenizer import Tokenizer, load_tokenizer
from calm.errors import UserError, one_line
from calm.files import locked_directory, write_json
from calm.llama import LlamaConfig
from calm.model import Calm, PlainCalmConfig

ARCHITECTURES = {"EnergyTransformer": "energy", "FlowTransformer": "flow", "DiffusionTransformer": "diffusion"}

Names = list[tuple[str, str]]

INSIDE = "ae_model."  # prefix of the autoencoder's keys in a language model
FUSED = r"(?:mlp_generator|generative_head)\.mlp_blocks\.(\d+)\.linears\.0\.weight"

# Their module names and ours; {} is a number. What follows a module's name in a key is the same.
LAYER = [("layernorm", "norm"), ("mlp.gate_proj", "gate"), ("mlp.up_proj", "up"), ("mlp.down_proj", "down")]
AUTOENCODER = [
    ("encoder.embed_tokens", "embedding"),
    ("encoder.squeeze_layer", "encoder.squeeze"),
    ("encoder.norm", "encoder.norm"),
    ("encoder.hidden_to_latent", "encoder.posterior"),
    ("decoder.latent_to_hidden", "decoder.latent"),
    ("decoder.expand_layer", "decoder.expand"),
    ("decoder.norm", "decoder.norm"),
]
BACKBONE = [
    ("transformer.embed_tokens", "chunk_embedding.tokens"),
    ("transformer.layers", "backbone.layers"),
    ("transformer.norm", "backbone.norm"),
    ("embed_proj", "chunk_embedding.compress"),
]
ENERGY = [
    ("noise_embd", "noise"),
    ("hidden_embd", "condition"),
    ("norm_noise", "noise_norm"),
    ("norm_hidden", "condition_norm"),
    ("mlp_blocks.{}.in_ln", "blocks.{}.norm"),
    ("mlp_blocks.{}.linears.0", "blocks.{}.fuse_condition"),  # its weight is split: see _language_model_weights
    ("mlp_blocks.{}.linears.0", "blocks.{}.fuse_state"),
    ("mlp_blocks.{}.linears.2", "blocks.{}.mix"),
    ("mlp_blocks.{}.linears.4", "blocks.{}.gate_up"),
    ("mlp_blocks.{}.down_proj", "blocks.{}.down"),
    ("final_layer.in_ln", "norm"),
    ("final_layer.linears.0", "mix"),
    ("final_layer.linears.2", "latent"),
]
DENOISER = [
    ("time_embed.mlp", "time"),
    ("cond_embed", "condition"),
    ("input_proj", "input"),
    ("res_blocks.{}.in_ln", "blocks.{}.norm"),
    ("res_blocks.{}.mlp", "blocks.{}.mlp"),
    ("res_blocks.{}.adaLN_modulation.1", "blocks.{}.modulation"),
    ("final_layer.adaLN_modulation.1", "modulation"),
    ("final_layer.linear", "output"),
]


def import_autoencoder(directory: Path) -> Autoencoder:
    fields = _read_config(directory)
    check_layers(fields, directory)
    config = _autoencoder_config(fields, directory)
    weights = _autoencoder_weights(read_weights(directory), fields, config)
    return _filled(Autoencoder, config, weights, directory)


def import_language_model(directory: Path, autoencoder: Path) -> Calm:
    fields, weights, inner_fields = _read_config(directory), read_weights(directory), _read_config(autoencoder)
    check_layers({"model": fields, "autoencoder": inner_fields}, directory, len(weights))
    inner = _autoencoder_config(inner_fields, autoencoder)
    _check_agreement(fields, inner, directory, autoencoder)
    head = _head(fields, weights, inner.latent_size, directory)
    config = _described(
        PlainCalmConfig,
        directory,
        backbone_config=_described(LlamaConfig, directory, **_llama_fields(fields)),
        autoencoder_config=inner,
        head=head,
        num_head_layers=field_of(fields, "num_mlp_layers", directory),
        num_model_samples=fields.get("num_samples", 8),
        alpha=fields.get("beta", 1.0),
        noise_size=fields.get("noise_size", 64),
        largest_latent=None,  # as the authors sample
        front_padding=False,
        eos_token_id=fields.get("eos_token_id"),
        pad_token_id=fields.get("pad_token_id"),
    )
    inside = {key.removeprefix(INSIDE): weights.pop(key) for key in list(weights) if key.startswith(INSIDE)}
    inner_weights = [
        Weight(f"autoencoder.{weight.name}", INSIDE + weight.key, weight.value)
        for weight in _autoencoder_weights(inside or read_weights(autoencoder), inner_fields, inner)
    ]
    return _filled(Calm, config, [*inner_weights, *_language_model_weights(weights, head)], directory)


def _described(cls: Any, directory: Path, **fields: Any) -> Any:
    """A configuration or a model from the fields of a checkpoint; invalid fields are a `UserError`."""
    try:
        return cls(**fields)
    except Exception as error:  # transformers checks with errors of several libraries
        message = f"the config.json in {directory} describes no model that can be built: {one_line(error)}"
        raise UserError(message) from error


# --------------------------------------------------------------------------------------------------------------- names


class Weight(NamedTuple):
    name: str  # ours
    key: str  # theirs
    value: Tensor


def _autoencoder_weights(
    weights: dict[str, Tensor], fields: dict[str, Any], config: AutoencoderConfig
) -> Iterator[Weight]:
    unused = tuple(  # an odd last layer is stored, but not used
        f"{part}.{part}_layers.{count}."
        for part, count in _layer_counts(config)
        if _layers(fields, f"num_{part}_layers") > count
    )
    weights = {key: value for key, value in weights.items() if not key.startswith(unused)}
    embedding, output = "encoder.embed_tokens.weight", weights.pop("decoder.lm_head_weight", None)
    if output is not None and not torch.equal(weights.setdefault(embedding, output), output):
        raise UserError(f"decoder.lm_head_weight differs from {embedding}: they should be one matrix")
    yield from _renamed(weights, _autoencoder_names(config))


def _layer_counts(config: AutoencoderConfig) -> list[tuple[str, int]]:
    return [("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)]


def _autoencoder_names(config: AutoencoderConfig) -> Names:
    names = [*AUTOENCODER]
    for part, count in _layer_counts(config):
        for number in range(count):
            half, place = divmod(number, count // 2)
            kind = ("token_layers", "chunk_layers")[half if part == "encoder" else 1 - half]
            names += [
                (f"{part}.{part}_layers.{number}.{theirs}", f"{part}.{kind}.{place}.{ours}") for theirs, ours in LAYER
            ]
    return names


def _language_model_weights(weights: dict[str, Tensor], head: str) -> Iterator[Weight]:
    if head == "energy":
        weights = _without_copies(weights)
        for key in [key for key in weights if re.fullmatch(FUSED, key)]:
            number, fused = re.findall(FUSED, key)[0], weights.pop(key)
            width = fused.shape[-1] // 2  # theirs acts on the concatenation of state and condition
            yield Weight(f"head.blocks.{number}.fuse_state.weight", key, fused[..., :width])
            yield Weight(f"head.blocks.{number}.fuse_condition.weight", key, fused[..., width:])
    yield from _renamed(weights, _language_model_names(head))


def _language_model_names(head: str) -> Names:
    prefixes, ours_prefix, names = ("mlp_generator.", "generative_head."), "head.", ENERGY
    if head != "energy":
        prefixes, ours_prefix, names = ("generative_head.net.",), "head.denoiser.", DENOISER
    return [*BACKBONE, *((prefix + theirs, ours_prefix + ours) for prefix in prefixes for theirs, ours in names)]


def _without_copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of an energy head, which the authors save under two names, under one of them."""
    kept = dict(weights)
    for key, value in weights.items():
        original = key.replace("generative_head.", "mlp_generator.")
        if key != original and original in weights:
            if not torch.equal(value, weights[original]):
                raise UserError(f"{key} should be a copy of {original}, but differs from it")
            del kept[key]
    return kept


def _renamed(weights: dict[str, Tensor], names: Names) -> Iterator[Weight]:
    for key, value in weights.items():
        if (name := _translate(key, names)) is None:
            raise UserError(f"the checkpoint holds {key}, which belongs to no part of the model")
        yield Weight(name, key, value)


def _translate(key: str, names: Names) -> str | None:
    """A key with its module renamed, or None for an unknown module."""
    for old, new in names:
        pattern = re.escape(old).replace(r"\{\}", r"(\d+)") + r"(\..+)"
        if match := re.fullmatch(pattern, key):
            *numbers, rest = match.groups()
            return new.format(*numbers) + rest
    return None


def _filled(cls: Any, config: Any, converted: Iterable[Weight], directory: Path) -> Any:
    """A model with exactly these weights; names and shapes are compared before memory is allocated."""
    weights = {weight.name: weight for weight in converted}
    with torch.device("meta"):
        expected = _described(cls, directory, config=config).state_dict()
    if missing := [name for name in expected if name not in weights]:
        keys = [_their_name(name, config) for name in missing]
        missing_keys = ", ".join(dict.fromkeys(keys[:3])) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        raise UserError(f"the weights in {directory} lack {missing_keys}")
    for name, weight in weights.items():
        if name not in expected:
            raise UserError(f"the weights in {directory} hold {weight.key}, for which the configuration has no place")
        if weight.value.shape != (shape := expected[name].shape):
            shapes = f"{tuple(weight.value.shape)}, but the configuration asks for {tuple(shape)}"
            raise UserError(f"the weights in {directory}: {weight.key} ({name} here) has the shape {shapes}")
    with no_init():
        model = cls(config)
    model.load_state_dict({name: weight.value for name, weight in weights.items()})
    return model


def _their_name(name: str, config: Any) -> str:
    """The authors' key for one of our weights."""
    if isinstance(config, AutoencoderConfig):
        names = _autoencoder_names(config)
    elif name.startswith("autoencoder."):
        return INSIDE + _their_name(name.removeprefix("autoencoder."), config.autoencoder_config)
    else:
        names = _language_model_names(config.head)
    return _translate(name, [(ours, theirs) for theirs, ours in names]) or name


# ------------------------------------------------------------------------------------------------------ configurations


def _read_config(directory: Path) -> dict[str, Any]:
    return read_json(directory / "config.json", f"{directory} is not a checkpoint directory: ")


def _autoencoder_config(fields: dict[str, Any], directory: Path) -> AutoencoderConfig:
    if "num_mlp_layers" in fields:
        raise UserError("the directory given as the autoencoder holds a language model")
    dropout = fields.get("ae_dropout", 0.15)
    layers = {name: _layers(fields, name) // 2 * 2 for name in ("num_encoder_layers", "num_decoder_layers")}
    return _described(
        AutoencoderConfig,
        directory,
        vocab_size=fields.get("vocab_size", 128_257),
        chunk_size=fields.get("patch_size", 4),
        latent_size=fields.get("latent_size", 128),
        hidden_size=fields.get("hidden_size", 512),
        intermediate_size=fields.get("intermediate_size", 1280),
        kl_weight=fields.get("kl_weight", 1e-3),
        kl_floor=fields.get("kl_clamp", 0.5),
        token_dropout=dropout,
        latent_dropout=dropout,
        mask_token_id=0,
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        initializer_range=fields.get("initializer_range", 0.02),
        **layers,
    )


def _layers(fields: dict[str, Any], name: str) -> int:
    if not isinstance(count := fields.get(name, 2), int):
        raise UserError(f"{name} in a config.json should be a number, not {count!r}")
    return count


def _llama_fields(fields: dict[str, Any]) -> dict[str, Any]:
    known = {*LlamaConfig.model_fields, "rope_theta", "rope_scaling", "bos_token_id", "eos_token_id", "pad_token_id"}
    return {name: value for name, value in fields.items() if name in known - {"model_type"}}


def _check_agreement(fields: dict[str, Any], config: AutoencoderConfig, directory: Path, autoencoder: Path) -> None:
    sizes = {"patch_size": config.chunk_size, "latent_size": config.latent_size, "vocab_size": config.vocab_size}
    for theirs, ours in sizes.items():
        if fields.get(theirs, ours) != ours:
            raise UserError(
                f"{directory} and {autoencoder} do not belong together: {theirs} is {fields[theirs]} and {ours}"
            )


def _head(fields: dict[str, Any], weights: dict[str, Tensor], latent_size: int, directory: Path) -> Any:
    """The kind of head, from the keys; the architecture in config.json must agree if it is a known one."""
    if any(key.startswith(("mlp_generator.", "generative_head.noise_embd")) for key in weights):
        kind = "energy"
    elif (output := weights.get("generative_head.net.final_layer.linear.weight")) is not None:
        kind = "flow" if len(output) == latent_size else "diffusion"
    else:
        raise UserError(f"the weights in {directory} have no generative head that is known")
    named = ARCHITECTURES.get((fields.get("architectures") or [""])[0], kind)
    if named != kind:
        raise UserError(f"the config.json in {directory} names a {named} head, but the weights have another: {kind}")
    return kind


def import_official(directory: Path, output: Path, autoencoder: Path | None = None) -> Calm | Autoencoder:
    """Read a published language model (or, without `autoencoder`, an autoencoder) and save it in `output`."""
    if autoencoder is None and "num_mlp_layers" in _read_config(directory):
        raise UserError(f"{directory} holds a language model; name its autoencoder's directory with --autoencoder")
    with _new_directory(output) as aside:
        model = import_autoencoder(directory) if autoencoder is None else import_language_model(directory, autoencoder)
        save_model(model, aside)
        for place in filter(None, (directory, autoencoder)):
            if (place / "tokenizer.json").exists():
                _tokenizer(place, model.config.vocab_size).save(aside)
                break
        write_json(aside / "run.json", {"imported_from": directory.name})
    return model


def _tokenizer(place: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a directory; often only config.json has the ids of its special tokens."""
    fields = _read_config(place)
    ids = {role: fields.get(f"{role}_id") for role in ("eos_token", "pad_token")}
    known = {role: number for role, number in ids.items() if isinstance(number, int) and number < vocab_size}
    return load_tokenizer(str(place), known)


@contextmanager
def _new_directory(output: Path) -> Iterator[Path]:
    """A directory that appears under its name once it is complete."""
    if output.exists():
        raise UserError(f"{output} exists; choose another directory")
    unfinished = output.with_name(output.name + ".writing")
    with locked_directory(unfinished, "calm import-official"):
        try:
            yield unfinished
            unfinished.rename(output)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
