"""Continuous Autoregressive Language Models: predict one vector for every K tokens.

`import calm` makes the Auto classes of transformers know our models, without importing torch or transformers itself:
the command line's help and the workers of `calm prepare` stay light.
"""

import importlib
from typing import Any

from calm import _auto

__version__ = "0.1.0.dev0"

_NAMES = {
    "CalmConfig": "calm.models.configuration",
    "CalmForCausalLM": "calm.models.calm",
    "ChunkAutoencoder": "calm.models.autoencoder",
    "ChunkAutoencoderConfig": "calm.models.configuration",
    "Posterior": "calm.models.posterior",
    "PreparedData": "calm.data.shards",
    "PrepareOptions": "calm.data.workers",
    "prepare": "calm.data.prepare",
}


_MODULES = ("scores", "heads", "models", "sampling", "evaluate")


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used."""
    if name in _MODULES:
        return importlib.import_module(f"calm.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'calm' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_NAMES, *_MODULES])


_auto.register_when_imported(
    {
        "transformers.models.auto.configuration_auto": "calm.models.configuration",
        "transformers.models.auto.modeling_auto": "calm.models.calm",
    }
)
