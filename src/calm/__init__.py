"""Continuous Autoregressive Language Models: predict one vector for every K tokens.

`import calm` makes the Auto classes of transformers know our models, without importing torch or transformers itself:
the command line's help and the workers of `calm prepare` stay light.
"""

import importlib
from typing import Any

from calm import _auto

__version__ = "0.2.0.dev0"

_NAMES = {
    "CalmConfig": "calm.hf",
    "CalmForCausalLM": "calm.hf",
    "ChunkAutoencoder": "calm.hf",
    "ChunkAutoencoderConfig": "calm.hf",
    "Posterior": "calm.autoencoder",
    "PreparedData": "calm.data.shards",
    "PrepareOptions": "calm.data.workers",
    "prepare": "calm.data.prepare",
}


_MODULES = ("scores", "heads", "generate", "evaluate")


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used."""
    if name in _MODULES:
        return importlib.import_module(f"calm.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'calm' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_NAMES, *_MODULES])


_auto.call_when_imported(
    {
        "transformers.models.auto.configuration_auto": "calm.hf:register_configs",
        "transformers.models.auto.modeling_auto": "calm.hf:register_models",
    }
)
