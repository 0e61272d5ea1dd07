"""Checkpoints that the authors of CALM published, turned into ours. The only file with their names in it.

A language-model directory holds the autoencoder's weights, but not its configuration: that is in a directory of its
own. Every key is accounted for: read, known to be a copy or unused, or an error that names it.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calm.autoencoder import Autoencoder, AutoencoderConfig
from calm.checkpoint import field_of, no_init, read_json, read_weights, save_model
from calm.data.tokenizer import Tokenizer, load_tokenizer
from calm.errors import UserError
from calm.files import claimed, write_json
from calm.llama import LlamaConfig
from calm.model import Calm, PlainCalmConfig

ARCHITECTURES = {"EnergyTransformer": "energy", "FlowTransformer": "flow", "DiffusionTransformer": "diffusion"}

Names = Sequence[tuple[str, str | None]]

INSIDE = "ae_model."  # what a language model's keys of its autoencoder begin with
ENERGY_PREFIX = r"(?:mlp_generator|generative_head)\."
FUSED = ENERGY_PREFIX + r"mlp_blocks\.\d+\.linears\.0\.weight"

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


def import_autoencoder(directory: Path) -> Autoencoder:
    fields = _read_config(directory)
    config = _autoencoder_config(fields, directory)
    weights = _autoencoder_weights(read_weights(directory), fields, config)
    return _filled(Autoencoder, config, weights, directory)


def import_language_model(directory: Path, autoencoder: Path) -> Calm:
    fields, weights, inner_fields = _read_config(directory), read_weights(directory), _read_config(autoencoder)
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
    """A configuration or a model; what its fields do not allow is the checkpoint's fault."""
    try:
        return cls(**fields)
    except Exception as error:  # transformers checks with errors of several libraries
        reason = " ".join(str(error).split()) or repr(error)
        raise UserError(f"the config.json in {directory} describes no model that can be built: {reason}") from error


# --------------------------------------------------------------------------------------------------------------- names


class Weight(NamedTuple):
    name: str  # ours
    key: str  # theirs
    value: Tensor


def _autoencoder_weights(
    weights: dict[str, Tensor], fields: dict[str, Any], config: AutoencoderConfig
) -> Iterator[Weight]:
    weights = dict(weights)
    embedding, output = "encoder.embed_tokens.weight", weights.pop("decoder.lm_head_weight", None)
    if output is not None and not torch.equal(weights.setdefault(embedding, output), output):
        raise UserError(f"decoder.lm_head_weight differs from {embedding}: they should be one matrix")
    yield from _renamed(weights, _autoencoder_names(fields, config))


def _autoencoder_names(fields: dict[str, Any], config: AutoencoderConfig) -> Names:
    names: list[tuple[str, str | None]] = [*AUTOENCODER]
    for part, count in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        layers = rf"{part}\.{part}_layers\."
        for number in range(count):
            half, place = divmod(number, count // 2)
            kind = ("token_layers", "chunk_layers")[half if part == "encoder" else 1 - half]
            names += [(rf"{layers}{number}\.{theirs}", f"{part}.{kind}.{place}.{ours}") for theirs, ours in LAYER]
        if _layers(fields, f"num_{part}_layers") > count:  # an odd last layer is stored, and not used
            names += [(rf"{layers}{count}\.{theirs}", None) for theirs, _ in LAYER]
    return names


def _language_model_weights(weights: dict[str, Tensor], head: str) -> Iterator[Weight]:
    weights = dict(weights)
    if head == "energy":
        _drop_copies(weights, "mlp_generator.", "generative_head.")
        for key in [key for key in weights if re.fullmatch(FUSED, key)]:
            (number,) = re.findall(r"mlp_blocks\.(\d+)", key)
            fused = weights.pop(key)
            width = fused.shape[-1] // 2  # theirs acts on state and condition, one after the other
            yield Weight(f"head.blocks.{number}.fuse_state.weight", key, fused[..., :width])
            yield Weight(f"head.blocks.{number}.fuse_condition.weight", key, fused[..., width:])
    yield from _renamed(weights, _language_model_names(head))


def _language_model_names(head: str) -> Names:
    backbone = (r"transformer\.((?:layers\.|norm\.).*)", r"backbone.\1")
    prefix, ours_prefix, names = ENERGY_PREFIX, "head.", ENERGY
    if head != "energy":
        prefix, ours_prefix, names = r"generative_head\.net\.", "head.denoiser.", DENOISER
    return [*EMBEDDING, backbone, *((prefix + theirs, ours_prefix + ours) for theirs, ours in names)]


def _drop_copies(weights: dict[str, Tensor], kept: str, copy: str) -> None:
    """They save one module under two names."""
    for key in [key for key in weights if key.startswith(copy)]:
        original = kept + key.removeprefix(copy)
        if original in weights:
            if not torch.equal(weights[key], weights[original]):
                raise UserError(f"{key} should be a copy of {original}, but differs from it")
            del weights[key]


def _renamed(weights: dict[str, Tensor], names: Names) -> Iterator[Weight]:
    for key, value in weights.items():
        for theirs, ours in names:
            if match := re.fullmatch(theirs, key):
                if ours is not None:
                    yield Weight(match.expand(ours), key, value)
                break
        else:
            raise UserError(f"the checkpoint holds {key}, which belongs to no part of the model")


def _filled(cls: Any, config: Any, converted: Iterable[Weight], directory: Path) -> Any:
    """A model with these weights and no other; names and shapes are compared before anything large is made."""
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
    """The key that would hold one of our weights: the names read backwards."""
    prefix = ""
    if isinstance(config, PlainCalmConfig):
        if not name.startswith("autoencoder."):
            fused = re.sub(
                r"head\.blocks\.(\d+)\.fuse_\w+\.weight", r"mlp_generator.mlp_blocks.\1.linears.0.weight", name
            )
            return fused if fused != name else _backwards(name, _language_model_names(config.head))
        prefix, name, config = INSIDE, name.removeprefix("autoencoder."), config.autoencoder_config
    return prefix + _backwards(name, _autoencoder_names({}, config))


def _backwards(name: str, names: Names) -> str:
    for theirs, ours in names:
        groups = re.findall(r"\((?!\?:)(?:[^()]|\(\?:[^()]*\))*\)", theirs)
        pattern = re.escape(ours or "")
        for number, group in enumerate(groups, 1):
            pattern = pattern.replace(re.escape(rf"\{number}"), group)
            theirs = theirs.replace(group, rf"\{number}", 1)
        if match := re.fullmatch(pattern, name):
            plain = re.sub(r"\(\?:([^|()]*)\|[^()]*\)", r"\1", theirs)  # of alternatives the first
            return match.expand(plain.replace(r"\.", "."))
    return name


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
    for theirs, ours in (
        ("patch_size", config.chunk_size),
        ("latent_size", config.latent_size),
        ("vocab_size", config.vocab_size),
    ):
        if fields.get(theirs, ours) != ours:
            raise UserError(
                f"{directory} and {autoencoder} do not belong together: {theirs} is {fields[theirs]} and {ours}"
            )


def _head(fields: dict[str, Any], weights: dict[str, Tensor], latent_size: int, directory: Path) -> Any:
    """By the keys, which do not lie; the name of the architecture must agree where it is known."""
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
    """The tokenizer of a directory; which ids end and pad is often said in config.json alone."""
    fields = _read_config(place)
    ids = {"eos_token": fields.get("eos_token_id"), "pad_token": fields.get("pad_token_id")}
    known = {role: number for role, number in ids.items() if isinstance(number, int) and number < vocab_size}
    return load_tokenizer(str(place), known)


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
