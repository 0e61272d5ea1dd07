"""A training run of an experiment: a recipe, overridden settings, and the autoencoder of a language model.

A run is identified by its key, a hash of its configuration, its data and its autoencoder's key. Paths and settings that
do not affect the weights, such as logging intervals, are excluded. Experiments that need the same run therefore share
it, and stored results remain valid on other machines.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from calm.config import RunConfig, changed_values, load_config

NO_EFFECT_ON_WEIGHTS = {  # fields of the train section that are not part of the key
    *("log_every", "evaluate_every", "evaluation_batches", "checkpoint_every", "keep_checkpoints"),
    *("tensorboard", "wandb"),
}
STEPS = "train.steps"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Run:
    recipe: str
    settings: tuple[tuple[str, Any], ...] = ()  # recipe field → value; later values override earlier ones
    autoencoder: "Run | None" = None

    def with_settings(self, changes: dict[str, Any]) -> "Run":
        """A copy with changed settings."""
        return replace(self, settings=(*self.settings, *changes.items()))

    def with_seed(self, seed: int) -> "Run":
        """A copy with another seed and the same autoencoder."""
        return self.with_settings({"seed": seed}) if seed else self

    def config(self, data: Path, autoencoder: Path | None) -> RunConfig:
        return load_config(self.recipe, self.overrides(data, autoencoder))

    def overrides(self, data: Path, autoencoder: Path | None) -> list[str]:
        """Arguments of `calm train RECIPE --set`."""
        values = dict(self.settings) | {"data.sets.0.path": str(data)}
        if autoencoder is not None:
            values["language_model.autoencoder"] = str(autoencoder)
        return [f"{field}={json.dumps(value)}" for field, value in values.items()]

    @property
    def base_config(self) -> RunConfig:
        """The configuration with placeholder paths."""
        return _base_config(self)

    @property
    def steps(self) -> int:
        return self.base_config.train.steps

    def key(self, data_digest: str) -> str:
        """Hash of everything that determines the weights; `data_digest` identifies the training data."""
        return _key(self, data_digest)

    def until(self, share: float) -> "Run":
        """The run after a fraction of its steps, with a constant learning rate: shorter runs can be extended."""
        return self.with_settings({STEPS: max(1, round(share * self.steps)), "optimizer.schedule": "constant"})

    @property
    def is_extendable(self) -> bool:
        """Whether a longer run can continue from this one and reach the same weights."""
        return self.base_config.optimizer.schedule == "constant"


@cache  # avoids loading and validating the recipe again
def _base_config(run: Run) -> RunConfig:
    return run.config(Path("data"), run.autoencoder and Path("autoencoder"))


@cache
def _key(run: Run, data_digest: str) -> str:
    values = changed_values(run.base_config)
    values["train"] = {name: value for name, value in values["train"].items() if name not in NO_EFFECT_ON_WEIGHTS}
    return digest([values, data_digest, run.autoencoder and run.autoencoder.key(data_digest)])
