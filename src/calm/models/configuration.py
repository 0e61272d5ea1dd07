"""Configs as transformers knows them: written as config.json, read by AutoConfig."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from calm.errors import ConfigError, did_you_mean
from calm.models.fields import AutoencoderFields, CalmFields


class ChunkAutoencoderConfig(AutoencoderFields, PretrainedConfig):
    __init__ = AutoencoderFields.__init__  # named, or transformers makes one of its own


class CalmConfig(CalmFields, PretrainedConfig):
    sub_configs = {"backbone_config": AutoConfig, "autoencoder_config": ChunkAutoencoderConfig}  # noqa: RUF012  # pyright: ignore
    __init__ = CalmFields.__init__

    def autoencoder_fields(self, given: ChunkAutoencoderConfig | dict[str, Any] | None) -> ChunkAutoencoderConfig:
        return given if isinstance(given, ChunkAutoencoderConfig) else ChunkAutoencoderConfig(**(given or {}))

    def backbone_fields(self, given: PretrainedConfig | dict[str, Any] | None) -> PretrainedConfig:
        if isinstance(given, PretrainedConfig):
            return given
        return make_backbone_config(given or {}, self.autoencoder_config.vocab_size)

    def get_text_config(self, *args, **kwargs):
        """Caches and attention ask for the part that attends."""
        return self.backbone_config


def make_backbone_config(fields: dict[str, Any], vocab_size: int) -> PretrainedConfig:
    """A backbone by its `model_type` (Llama by default) and fields, which must be known ones."""
    fields = {"model_type": "llama", "vocab_size": vocab_size, **fields}
    kind = fields.pop("model_type")
    try:
        default = AutoConfig.for_model(kind)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"backbone: no model_type {kind!r} in transformers{did_you_mean(kind, CONFIG_MAPPING)}"
        ) from error
    known = {*default.to_dict(), *default.attribute_map, "rope_theta", "rope_scaling"}
    for field in fields:
        if field not in known:
            raise ConfigError(f"backbone: a {kind} has no field {field!r}{did_you_mean(field, known)}")
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:  # the checks of transformers' configs raise errors of several libraries
        raise ConfigError(f"backbone: {kind} cannot be built: {' '.join(str(error).split())}") from error


AutoConfig.register(ChunkAutoencoderConfig.model_type, ChunkAutoencoderConfig)
AutoConfig.register(CalmConfig.model_type, CalmConfig)
