"""Transformers of the transformers library: built from a config, and taken apart into layers."""

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from calm.errors import ConfigError


def build_transformer(auto_class: Any, config: PretrainedConfig) -> Any:
    """A new one that reads from left to right; `auto_class` is AutoModel or AutoModelForCausalLM."""
    kind = config.model_type
    try:
        model = auto_class.from_config(config)
        model.get_input_embeddings()
    except Exception as error:  # transformers raises many kinds for a config that makes no sense
        raise ConfigError(f"a backbone {kind!r} cannot be built: {' '.join(str(error).split())}") from error
    if any(getattr(part, "is_causal", True) is False for part in model.modules()):
        raise ConfigError(f"a backbone {kind!r} reads in both directions; one that predicts must read in one")
    return model


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of any Transformer: its longest list of modules that lies in no other list, as experts do."""
    lists = {path: part for path, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    outer = [part for path, part in lists.items() if not any(path.startswith(f"{other}.") for other in lists)]
    return list(max(outer, key=len)) if outer else []
