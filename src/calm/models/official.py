"""Checkpoints that the authors of CALM published, turned into ours. The only file with their names in it.

A language-model directory holds the autoencoder's weights, but not its configuration: that is in a directory of its
own. Every key is accounted for: read, known to be a copy or unused, or an error that names it.
"""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from calm.data.tokenizer import load_tokenizer
from calm.errors import UserError
from calm.files import claimed, write_json
from calm.models.autoencoder import ChunkAutoencoder
from calm.models.calm import CalmForCausalLM
from calm.models.configuration import CalmConfig, ChunkAutoencoderConfig

ARCHITECTURES = {"EnergyTransformer": "energy", "FlowTransformer": "flow", "DiffusionTransformer": "diffusion"}
WEIGHTS = ("model.safetensors", "pytorch_model.bin")

Names = Sequence[tuple[str, str | None]]

# Their names → ours, as patterns over whole keys. A name that maps to None is stored by them and not used.
LAYER = [
    (r"layernorm\.weight", "norm.weight"),
    (r"mlp\.(gate|up|down)_proj\.weight", r"\1.weight"),
]
AUTOENCODER = [
    (r"encoder\.embed_tokens\.weight", "embedding.weight"),
    (r"encoder\.squeeze_layer\.(weight|bias)", r"encoder.squeeze.\1"),
    (r"encoder\.norm\.weight", "encoder.norm.weight"),
    (r"encoder\.hidden_to_latent\.(weight|bias)", r"encoder.posterior.\1"),
    (r"decoder\.latent_to_hidden\.(weight|bias)", r"decoder.latent.\1"),
    (r"decoder\.expand_layer\.(weight|bias)", r"decoder.expand.\1"),
    (r"decoder\.norm\.weight", "decoder.norm.weight"),
]
EMBEDDING = [
    (r"transformer\.embed_tokens\.weight", "chunk_embedding.tokens.weight"),
    (r"embed_proj\.([023])\.(weight|bias)", r"chunk_embedding.compress.\1.\2"),
]
ENERGY = [
    (r"noise_embd\.(weight|bias)", r"noise.\1"),
    (r"hidden_embd\.(weight|bias)", r"condition.\1"),
    (r"norm_noise\.(weight|bias)", r"noise_norm.\1"),
    (r"norm_hidden\.(weight|bias)", r"condition_norm.\1"),
    (r"mlp_blocks\.(\d+)\.in_ln\.(weight|bias)", r"blocks.\1.norm.\2"),
    (r"mlp_blocks\.(\d+)\.linears\.0\.bias", r"blocks.\1.fuse_condition.bias"),
    (r"mlp_blocks\.(\d+)\.linears\.2\.(weight|bias)", r"blocks.\1.mix.\2"),
    (r"mlp_blocks\.(\d+)\.linears\.4\.(weight|bias)", r"blocks.\1.gate_up.\2"),
    (r"mlp_blocks\.(\d+)\.down_proj\.(weight|bias)", r"blocks.\1.down.\2"),
    (r"final_layer\.in_ln\.(weight|bias)", r"norm.\1"),
    (r"final_layer\.linears\.0\.(weight|bias)", r"mix.\1"),
    (r"final_layer\.linears\.2\.(weight|bias)", r"latent.\1"),
]
DENOISER = [
    (r"time_embed\.mlp\.([02])\.(weight|bias)", r"time.\1.\2"),
    (r"cond_embed\.(weight|bias)", r"condition.\1"),
    (r"input_proj\.(weight|bias)", r"input.\1"),
    (r"res_blocks\.(\d+)\.in_ln\.(weight|bias)", r"blocks.\1.norm.\2"),
    (r"res_blocks\.(\d+)\.mlp\.([02])\.(weight|bias)", r"blocks.\1.mlp.\2.\3"),
    (r"res_blocks\.(\d+)\.adaLN_modulation\.1\.(weight|bias)", r"blocks.\1.modulation.\2"),
    (r"final_layer\.adaLN_modulation\.1\.(weight|bias)", r"modulation.\1"),
    (r"final_layer\.linear\.(weight|bias)", r"output.\1"),
]


def import_autoencoder(directory: Path) -> ChunkAutoencoder:
    config = _autoencoder_config(_read_config(directory))
    weights = _read_weights(directory)
    model = ChunkAutoencoder(config)
    _fill(model, dict(_autoencoder_weights(weights, config)), directory)
    return model


def import_language_model(directory: Path, autoencoder: Path) -> CalmForCausalLM:
    fields, weights = _read_config(directory), _read_weights(directory)
    autoencoder_config = _autoencoder_config(_read_config(autoencoder))
    head = _head(fields, weights, directory)
    _check_agreement(fields, autoencoder_config, directory, autoencoder)
    config = CalmConfig(
        backbone_config=_llama_config(fields),
        autoencoder_config=autoencoder_config,
        head=head,
        num_head_layers=_field(fields, "num_mlp_layers", directory),
        num_model_samples=fields.get("num_samples", 8),
        alpha=fields.get("beta", 1.0),
        noise_size=fields.get("noise_size", 64),
    )
    model = CalmForCausalLM(config)
    inside = {key.removeprefix("ae_model."): weights.pop(key) for key in list(weights) if key.startswith("ae_model.")}
    named = [
        ("autoencoder." + n, v)
        for n, v in _autoencoder_weights(inside or _read_weights(autoencoder), config.autoencoder_config)
    ]
    named += _language_model_weights(weights, head)
    _fill(model, dict(named), directory)
    return model


# --------------------------------------------------------------------------------------------------------------- names


def _autoencoder_weights(weights: dict[str, Tensor], config: ChunkAutoencoderConfig) -> Iterator[tuple[str, Tensor]]:
    weights = dict(weights)
    output = weights.pop("decoder.lm_head_weight", None)
    if output is not None and not torch.equal(output, weights.get("encoder.embed_tokens.weight", output)):
        raise UserError("decoder.lm_head_weight differs from encoder.embed_tokens.weight: they should be one matrix")
    patterns: list[tuple[str, str | None]] = [*AUTOENCODER]
    for part, count in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        for number in range(count):
            half, place = divmod(number, count // 2)
            kind = ("token_layers", "chunk_layers")[half if part == "encoder" else 1 - half]
            patterns += [
                (rf"{part}\.{part}_layers\.{number}\.{theirs}", rf"{part}.{kind}.{place}.{ours}")
                for theirs, ours in LAYER
            ]
        patterns += [(rf"{part}\.{part}_layers\.{count}\.{theirs}", None) for theirs, _ in LAYER]  # an odd last layer
    yield from _renamed(weights, patterns)


def _language_model_weights(weights: dict[str, Tensor], head: str) -> Iterator[tuple[str, Tensor]]:
    weights = dict(weights)
    if head == "energy":
        _drop_copies(weights, "mlp_generator.", "generative_head.")
        prefix = r"(?:mlp_generator|generative_head)\."
        for key in [key for key in weights if re.fullmatch(prefix + r"mlp_blocks\.\d+\.linears\.0\.weight", key)]:
            (number,) = re.findall(r"mlp_blocks\.(\d+)", key)
            state, condition = weights.pop(key).chunk(2, dim=1)  # theirs acts on both, one after the other
            yield f"head.blocks.{number}.fuse_state.weight", state
            yield f"head.blocks.{number}.fuse_condition.weight", condition
        names = [(prefix + theirs, f"head.{ours}") for theirs, ours in ENERGY]
    else:
        names = [(r"generative_head\.net\." + theirs, f"head.denoiser.{ours}") for theirs, ours in DENOISER]
    backbone = (r"transformer\.((?:layers\.|norm\.).*)", r"backbone.\1")
    yield from _renamed(weights, [*EMBEDDING, backbone, *names])


def _drop_copies(weights: dict[str, Tensor], kept: str, copy: str) -> None:
    """They save one module under two names."""
    for key in [key for key in weights if key.startswith(copy)]:
        original = kept + key.removeprefix(copy)
        if original in weights:
            if not torch.equal(weights[key], weights[original]):
                raise UserError(f"{key} should be a copy of {original}, but differs from it")
            del weights[key]


def _renamed(weights: dict[str, Tensor], patterns: Names) -> Iterator[tuple[str, Tensor]]:
    for key, value in weights.items():
        for theirs, ours in patterns:
            if match := re.fullmatch(theirs, key):
                if ours is not None:
                    yield match.expand(ours), value
                break
        else:
            raise UserError(f"the checkpoint holds {key}, which belongs to no part of the model")


def _fill(model: PreTrainedModel, weights: dict[str, Tensor], directory: Path) -> None:
    expected = model.state_dict()
    if missing := [name for name in expected if name not in weights]:
        raise UserError(f"the weights in {directory} lack what is {missing[0]} here ({len(missing)} in all)")
    for name, value in weights.items():
        if name not in expected:
            raise UserError(f"the weights in {directory} hold {name}, for which the configuration has no place")
        if value.shape != expected[name].shape:
            shapes = f"{tuple(value.shape)}, but the configuration asks for {tuple(expected[name].shape)}"
            raise UserError(f"the weights in {directory}: what is {name} here has the shape {shapes}")
    model.load_state_dict(weights)


# ------------------------------------------------------------------------------------------------------ configurations


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        return json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{directory} is not a checkpoint directory: its config.json cannot be read ({error})"
        ) from error


def _field(fields: dict[str, Any], name: str, directory: Path) -> Any:
    if name not in fields:
        raise UserError(f"the config.json in {directory} has no field {name!r}")
    return fields[name]


def _autoencoder_config(fields: dict[str, Any]) -> ChunkAutoencoderConfig:
    if "num_mlp_layers" in fields:
        raise UserError("the directory given as the autoencoder holds a language model")
    dropout = fields.get("ae_dropout", 0.15)
    layers = {name: fields.get(name, 2) // 2 * 2 for name in ("num_encoder_layers", "num_decoder_layers")}
    return ChunkAutoencoderConfig(
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


def _llama_config(fields: dict[str, Any]) -> LlamaConfig:
    known = set(LlamaConfig().to_dict()) | {"rope_theta", "rope_scaling"}
    ours = {"architectures", "model_type", "transformers_version", "torch_dtype", "dtype"}
    return LlamaConfig(**{name: value for name, value in fields.items() if name in known - ours})


def _check_agreement(
    fields: dict[str, Any], config: ChunkAutoencoderConfig, directory: Path, autoencoder: Path
) -> None:
    for theirs, ours in (
        ("patch_size", config.chunk_size),
        ("latent_size", config.latent_size),
        ("vocab_size", config.vocab_size),
    ):
        if fields.get(theirs, ours) != ours:
            raise UserError(
                f"{directory} and {autoencoder} do not belong together: {theirs} is {fields[theirs]} and {ours}"
            )


def _head(fields: dict[str, Any], weights: dict[str, Tensor], directory: Path) -> Any:
    """By the keys, which do not lie; the name of the architecture must agree where it is known."""
    if any(key.startswith(("mlp_generator.", "generative_head.noise_embd")) for key in weights):
        found = "energy"
    elif (output := weights.get("generative_head.net.final_layer.linear.weight")) is not None:
        found = "flow" if len(output) == _field(fields, "latent_size", directory) else "diffusion"
    else:
        raise UserError(f"the weights in {directory} have no generative head that is known")
    named = ARCHITECTURES.get((fields.get("architectures") or [""])[0], found)
    if named != found:
        raise UserError(f"the config.json in {directory} names a {named} head, but the weights have another: {found}")
    return found


# --------------------------------------------------------------------------------------------------------------- files


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """One file or many, safetensors or a pickled state dict, which is read with weights_only."""
    for name in WEIGHTS:
        if (index := directory / f"{name}.index.json").exists():
            files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
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


def import_official(directory: Path, output: Path, autoencoder: Path | None = None) -> PreTrainedModel:
    """Read a published language model (or, without `autoencoder`, an autoencoder) and save it in `output`."""
    if autoencoder is None and "num_mlp_layers" in _read_config(directory):
        raise UserError(f"{directory} holds a language model; name its autoencoder's directory with --autoencoder")
    with _new_directory(output) as aside:
        model = import_autoencoder(directory) if autoencoder is None else import_language_model(directory, autoencoder)
        model.save_pretrained(aside)
        for place in filter(None, (directory, autoencoder)):
            if (place / "tokenizer.json").exists():
                fields = _read_config(place)
                ids = {"eos_token": fields.get("eos_token_id"), "pad_token": fields.get("pad_token_id")}
                load_tokenizer(str(place), {role: i for role, i in ids.items() if isinstance(i, int)}).save(aside)
                break
        write_json(aside / "run.json", {"imported_from": directory.name})
    return model


@contextmanager
def _new_directory(output: Path) -> Iterator[Path]:
    """A directory that appears whole, or not at all."""
    if output.exists():
        raise UserError(f"{output} exists; name another directory")
    aside = output.with_name(output.name + ".writing")
    with claimed(aside, "calm import-official"):
        try:
            yield aside
            aside.rename(output)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
