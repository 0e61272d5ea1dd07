"""A training run of an experiment: a recipe, what is different in it, and the autoencoder that it stands on.

A run is known by its key, a hash of its configuration, of the text and of its autoencoder's key; directories and what
only decides how often a run is looked at do not count. Experiments that need the same run therefore share it, and a
result that was kept is found again on another machine.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from calm.config import RunConfig, load_config

WITHOUT_EFFECT = {  # fields of train that change no weight
    *("log_every", "evaluate_every", "evaluation_batches", "checkpoint_every", "keep_checkpoints"),
    *("tensorboard", "wandb"),
}
STEPS = "train.steps"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Run:
    recipe: str
    settings: tuple[tuple[str, Any], ...] = ()  # fields of the recipe and their values; the last word counts
    autoencoder: "Run | None" = None

    def but(self, changes: dict[str, Any]) -> "Run":
        """The same with other values of some fields."""
        return replace(self, settings=(*self.settings, *changes.items()))

    def of(self, seed: int) -> "Run":
        """The same with another seed; the autoencoder stays."""
        return self.but({"seed": seed}) if seed else self

    def config(self, data: Path, autoencoder: Path | None) -> RunConfig:
        return load_config(self.recipe, self.overrides(data, autoencoder))

    def overrides(self, data: Path, autoencoder: Path | None) -> list[str]:
        """What `calm train RECIPE --set` takes."""
        values = dict(self.settings) | {"data.sets.0.path": str(data)}
        if autoencoder is not None:
            values["language_model.autoencoder"] = str(autoencoder)
        return [f"{field}={json.dumps(value)}" for field, value in values.items()]

    @property
    def plain(self) -> RunConfig:
        """The configuration as far as it depends on no directory."""
        return _plain(self)

    @property
    def steps(self) -> int:
        return self.plain.train.steps

    def key(self, text: str) -> str:
        """`text` says what is read: other data, other keys."""
        return _key(self, text)

    def until(self, share: float) -> "Run":
        """The same run after a part of its steps. The learning rate must not know where it ends: it stays constant."""
        return self.but({STEPS: max(1, round(share * self.steps)), "optimizer.schedule": "constant"})

    @property
    def can_go_on(self) -> bool:
        """Whether a longer run of the same kind is this one, continued."""
        return self.plain.optimizer.schedule == "constant"


@cache  # a recipe file is read and checked for each
def _plain(run: Run) -> RunConfig:
    return run.config(Path("data"), run.autoencoder and Path("autoencoder"))


@cache
def _key(run: Run, text: str) -> str:
    values = run.plain.model_dump(mode="json", exclude_defaults=True)
    values["train"] = {name: value for name, value in values["train"].items() if name not in WITHOUT_EFFECT}
    return digest([values, text, run.autoencoder and run.autoencoder.key(text)])
