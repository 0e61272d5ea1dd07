"""Training runs of the experiments, and scales: from minutes on two cores to the paper's model sizes on a cluster.

A run is identified by its key, a hash of its configuration, its data and its autoencoder's key. Paths and settings that
do not affect the weights, such as logging intervals, are excluded. Experiments that need the same run therefore share
it, and stored results remain valid on other machines.

A scale selects the recipes for the paper's models, the data, and how much of it is scored. Everything else is the same
at every scale. The embedded text uses a vocabulary of 280 tokens, mostly single characters: small models soon reach a
positive BrierLM on it, and models can only be ranked by scores above 0.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from calm.config import RunConfig, changed_values, load_config
from calm.data.workers import PrepareOptions
from calm.errors import UserError, did_you_mean

CHUNK_SIZES = (1, 2, 4, 8)
DEFAULT_CHUNK_SIZE = 4
EMBEDDED = PrepareOptions("bpe:280", validation_share=0.05, test_share=0.05)
NO_EFFECT_ON_WEIGHTS = {  # fields of the train section that are not part of the key
    *("log_every", "evaluate_every", "evaluation_batches", "checkpoint_every", "keep_checkpoints"),
    *("tensorboard", "wandb"),
}
STEPS = "train.steps"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


LIMITS = {"max_document_bytes"}  # which no chapter reaches
EMBEDDED_DIGEST = digest(["embedded", {name: value for name, value in vars(EMBEDDED).items() if name not in LIMITS}])


@dataclass(frozen=True)
class Run:
    """A training run: a recipe with changed settings and, for a CALM model, its autoencoder."""

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

    def until(self, fraction: float) -> "Run":
        """The run after a fraction of its steps, with a constant learning rate: shorter runs can be extended."""
        return self.with_settings({STEPS: max(1, round(fraction * self.steps)), "optimizer.schedule": "constant"})

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


@dataclass(frozen=True)
class Scale:
    name: str
    about: str
    prepared: Path | None  # the prepared data; None: prepare the embedded text
    preparation: str  # command that creates `prepared`
    autoencoders: dict[int, Run]  # by chunk size K
    calms: dict[str, Run]  # by size; "base" is used in ablations
    transformers: dict[str, Run]
    curve_points: tuple[float, ...]  # fractions of the training steps at which training curves are measured
    seeds: tuple[int, ...] = (0,)  # seeds of each run
    repeats: tuple[int, ...] = ()  # seeds of the base run, to estimate variance across seeds
    chunk_size: int = DEFAULT_CHUNK_SIZE
    split: str = "test"
    samples: int = 16  # per position
    context: int | None = None  # in tokens
    most_tokens: int | None = None  # maximum number of tokens to score
    positions: int = 400  # of the accuracy-diversity trade-off
    candidates: tuple[int, ...] = (1, 10, 20, 50, 100, 200, 500, 1000)

    @property
    def has_custom_chunk_size(self) -> bool:
        return self.chunk_size != DEFAULT_CHUNK_SIZE

    @property
    def directory(self) -> str:
        return f"{self.name}-k{self.chunk_size}" if self.has_custom_chunk_size else self.name

    def autoencoder(self, changes: dict[str, Any] | None = None, chunk_size: int | None = None) -> Run:
        return self.autoencoders[chunk_size or self.chunk_size].with_settings(changes or {})

    def calm(self, changes: dict[str, Any] | None = None, *, size: str = "base", autoencoder: Run | None = None) -> Run:
        """A CALM language model on the given autoencoder, by default that of the scale.

        The number of chunks per sequence does not depend on the chunk size. The batch size is adjusted so that a step
        has as many tokens as with the scale's own chunk size.
        """
        autoencoder = autoencoder or self.autoencoder()
        chunk_size = autoencoder.base_config.data.chunk_size
        shape = {f"autoencoder.{name}": getattr(autoencoder.base_config.autoencoder, name) for name in SHAPE}
        run = Run(self.calms[size].recipe, self.calms[size].settings, autoencoder)
        data = run.base_config.data
        settings = {
            "data.chunk_size": chunk_size,
            "data.sequence_length": data.sequence_length * chunk_size // data.chunk_size,
            "data.batch_size": max(1, data.batch_size * self.chunk_size // chunk_size),
        }
        return run.with_settings(settings | shape | (changes or {}))

    def transformer(self, size: str = "base") -> Run:
        return self.transformers[size]

    def training_curve(self, run: Run) -> list[tuple[int, Run]]:
        """The run after each fraction of its steps in `curve_points`, as (steps, run)."""
        return [((partial := run.until(fraction)).steps, partial) for fraction in self.curve_points]


SHAPE = ("latent_size", "hidden_size", "intermediate_size", "num_encoder_layers", "num_decoder_layers")


def _backbone(layers: int, width: int, heads: int = 4) -> dict[str, Any]:
    return {
        "language_model.backbone.hidden_size": width,
        "language_model.backbone.intermediate_size": -(-width * 8 // 3 // 16) * 16,  # rounded up to a multiple of 16
        "language_model.backbone.num_hidden_layers": layers,
        "language_model.backbone.num_attention_heads": heads,
    }


def _embedded(name: str, about: str, sizes: dict[str, dict[str, Any]], changes: dict[str, Any], **more: Any) -> Scale:
    """A scale on the embedded text with the characters-* recipes; `changes` apply to all three of them."""
    autoencoder, calm, transformer = (Run(f"characters-{kind}") for kind in ("autoencoder", "calm", "transformer"))
    return Scale(
        name,
        about,
        None,
        "",
        {
            k: autoencoder.with_settings({"data.chunk_size": k, "autoencoder.latent_size": 8 * k, **changes})
            for k in CHUNK_SIZES
        },
        {size: calm.with_settings(changes | shape) for size, shape in sizes.items()},
        {size: transformer.with_settings(changes | shape) for size, shape in sizes.items()},
        context=128,
        **more,
    )


_SMALL = {"S": _backbone(1, 32), "M": _backbone(1, 48), "L": _backbone(2, 48), "XL": _backbone(2, 64)}
TOY = _embedded(
    "toy",
    "minutes on two cores; a smoke test whose scores are not meaningful",
    {"base": _SMALL["S"], **_SMALL},
    {STEPS: 20, "optimizer.warmup_steps": 5, "autoencoder.hidden_size": 32, "autoencoder.intermediate_size": 64},
    curve_points=(0.25, 0.5, 1.0),
    samples=4,
    most_tokens=3_000,
    positions=40,
    candidates=(1, 10, 20),
    repeats=(0, 1, 2),
)
_MEDIUM = {"S": _backbone(2, 128), "M": _backbone(4, 192), "L": _backbone(4, 256), "XL": _backbone(6, 384, 6)}
LAPTOP = _embedded(
    "laptop",
    "hours on two cores: about six minutes per run on one core, character-level text",
    {"base": _MEDIUM["L"], **_MEDIUM},
    {},
    curve_points=(0.05, 0.1, 0.25, 0.5, 0.75, 1.0),
    most_tokens=40_000,
    positions=2_000,
    repeats=(0, 1, 2, 3),
)
ENWIK8 = Scale(
    "enwik8",
    "days on two cores: Wikipedia text, about an hour per run",
    Path("data/enwik8"),
    "calm prepare enwik8.train.jsonl.gz --tokenizer bpe:8192 --validation-share 0.02 --test-share 0.02 "
    "--output data/enwik8",
    {
        k: Run("enwik8-autoencoder").with_settings({"data.chunk_size": k, "autoencoder.latent_size": 16 * k})
        for k in CHUNK_SIZES
    },
    {
        "base": Run("enwik8-calm"),
        "M": Run("enwik8-calm").with_settings(_backbone(4, 256)),
        "L": Run("enwik8-calm"),
        "XL": Run("enwik8-calm").with_settings(_backbone(8, 512, 8)),
    },
    {
        "base": Run("enwik8-transformer"),
        "S": Run("enwik8-transformer").with_settings(_backbone(4, 192)),
        "M": Run("enwik8-transformer").with_settings(_backbone(4, 256)),
        "L": Run("enwik8-transformer"),
    },
    curve_points=(0.05, 0.1, 0.25, 0.5, 0.75, 1.0),
)
PAPER = Scale(
    "paper",
    "the paper's model sizes, data and steps, for a cluster (torchrun ... -m calm reproduce)",
    Path("data/pile"),
    "calm prepare 'pile/*.jsonl.zst' --tokenizer tokenizer.model --validation-share 0.0001 --test-share 0.0001 "
    "--output data/pile",
    {k: Run(f"paper-autoencoder-k{k}") for k in CHUNK_SIZES},
    {"base": Run("paper-ablation")} | {size: Run(f"paper-calm-{size.lower()}") for size in ("M", "L", "XL")},
    {size: Run(f"paper-transformer-{recipe}") for size, recipe in {"base": "s", "S": "s", "M": "m", "L": "l"}.items()},
    curve_points=(0.1, 0.25, 0.5, 0.75, 1.0),
    samples=4,
)
SCALES = {scale.name: scale for scale in (TOY, LAPTOP, ENWIK8, PAPER)}


def scale_of(name: str, chunk_size: int = DEFAULT_CHUNK_SIZE) -> Scale:
    if name not in SCALES:
        raise UserError(f"unknown scale {name!r}: choose one of {', '.join(SCALES)}{did_you_mean(name, list(SCALES))}")
    if chunk_size not in CHUNK_SIZES:
        raise UserError(f"--chunk-size must be one of {', '.join(map(str, CHUNK_SIZES))}, not {chunk_size}")
    return replace(SCALES[name], chunk_size=chunk_size)
