"""Run configurations: typed, strict, documented. Defaults, then a recipe file, then `--set section.key=value`."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from calm.errors import ConfigError, did_you_mean
from calm.files import write_atomic

Share = Annotated[float, Field(ge=0, le=1)]
CONFIG_FILE = "config.yaml"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DataSet(Section):
    path: Path = Field(description="a directory made by calm prepare")
    weight: float = Field(1.0, gt=0, description="its share of the rows, relative to the other sets")


class Data(Section):
    """What is read, and how it is cut."""

    sets: list[DataSet] = Field(min_length=1, description="prepared sets; several are mixed by weight")
    chunk_size: int = Field(4, ge=1, description="K, the tokens that one vector stands for")
    sequence_length: int = Field(512, ge=1, description="tokens that a row predicts; a multiple of chunk_size")
    batch_size: int = Field(32, ge=1, description="rows of a step, over all processes")
    align_documents: bool = Field(False, description="pad documents to whole chunks instead of packing them")
    front_fill: Share = Field(1.0, description="share of rows that begin with 0 to K-1 fill ids")
    verify: bool = Field(True, description="compare the shards' checksums when opening them")

    @model_validator(mode="after")
    def _whole_chunks(self) -> "Data":
        if self.sequence_length % self.chunk_size:
            raise ValueError(
                f"sequence_length must be a multiple of chunk_size, but {self.sequence_length} is none of "
                f"{self.chunk_size}"
            )
        return self


class Autoencoder(Section):
    """The autoencoder of §2; the defaults are the paper's for K = 4."""

    latent_size: int = Field(128, ge=1, description="Z; the paper takes 32·K")
    hidden_size: int = Field(512, ge=1)
    intermediate_size: int = Field(1280, ge=1)
    num_encoder_layers: int = Field(2, ge=0, multiple_of=2, description="half before the squeeze, half after")
    num_decoder_layers: int = Field(2, ge=0, multiple_of=2, description="half before the expansion, half after")
    variational: bool = Field(True, description="false: reconstruction only, no noise and no KL")
    kl_weight: float = Field(1e-3, ge=0)
    kl_floor: float = Field(0.5, ge=0, description="nats below which a dimension's KL is not pressed; 0: no floor")
    token_dropout: float = Field(0.15, ge=0, lt=1, description="share of tokens replaced by the mask id")
    latent_dropout: float = Field(0.15, ge=0, lt=1, description="share of latent dimensions set to 0")
    vocabulary_sample: int | None = Field(
        None,
        ge=0,
        description="the training loss runs over the batch's words and this many random ones; null: over all",
    )


class LanguageModel(Section):
    """The continuous language model of §3; of a Transformer only the backbone counts."""

    autoencoder: Path | None = Field(None, description="the directory of a trained autoencoder")
    start: Path | None = Field(None, description="a language model's directory to continue from, as it is")
    backbone: Path | dict[str, Any] = Field(
        {}, description="fields of a transformers config (model_type: llama by default), or a pretrained directory"
    )
    model_input: Literal["discrete", "continuous", "both"] = Field("discrete", description="Table 5 of the paper")
    words_from_autoencoder: bool = Field(False, description="the token embedding begins as the autoencoder's")
    head: Literal["energy", "flow", "mean-flow", "diffusion", "chain"] = "energy"
    num_head_layers: int | None = Field(None, ge=1, description="blocks; null: a quarter of the backbone's layers")
    num_model_samples: int = Field(8, ge=1, description="N, samples or repeats of a position in training")
    num_target_samples: int | None = Field(None, ge=1, description="M of the energy loss; null: closed form")
    alpha: float = Field(1.0, description="exponent of the energy score, in (0, 2]")
    noise_size: int = Field(64, ge=1, description="of the energy head")
    sampler: Literal["euler", "midpoint"] = Field("midpoint", description="of the flow head")
    num_sampling_steps: int | None = Field(None, ge=1, description="of the flow and the diffusion head")
    own_words: bool = Field(
        False, description="of the chain head: words of its own, which begin as the autoencoder's and go on learning"
    )
    vocabulary_sample: int | None = Field(
        None,
        ge=1,
        description="of the chain head: sums over words run over the batch's and this many random ones, which "
        "stand for the rest; null: over all",
    )

    @model_validator(mode="after")
    def _sensible(self) -> "LanguageModel":
        if self.head == "energy" and self.num_model_samples < 2:
            raise ValueError(
                "the energy loss compares samples with each other: num_model_samples must be at least 2, not "
                f"{self.num_model_samples}"
            )
        if not 0 < self.alpha <= 2:
            raise ValueError(
                f"alpha must lie in (0, 2]: the energy score is no proper scoring rule for alpha = {self.alpha}"
            )
        default = LanguageModel.model_construct()
        other = {name for name in self.model_fields_set if getattr(self, name) != getattr(default, name)} - {
            "start",
            "vocabulary_sample",  # of the training, not of the model
        }
        if self.start is not None and other:
            raise ValueError(f"start takes the model as it is, so {', '.join(sorted(other))} cannot be set beside it")
        return self


class Optimizer(Section):
    """AdamW with the paper's settings (§7.1)."""

    learning_rate: float = Field(3e-4, gt=0)
    warmup_steps: int = Field(2000, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = Field("constant", description="after the warm-up")
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, description="of matrices")
    gradient_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")


class Train(Section):
    """The loop."""

    steps: int = Field(ge=1)
    accumulation: int = Field(1, ge=1, description="parts in which a process computes its share of a batch")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of the computation; weights stay in fp32")
    compile: bool = Field(False, description="torch.compile; needs a C++ compiler on CPU")
    gradient_checkpointing: bool = Field(False, description="of the backbone: less memory, more time")
    log_every: int = Field(10, ge=1)
    evaluate_every: int = Field(500, ge=1)
    evaluation_batches: int = Field(50, ge=1)
    checkpoint_every: int = Field(500, ge=1)
    keep_checkpoints: int = Field(2, ge=1, description="the last so many, and the best")
    tensorboard: bool = True
    wandb: bool = False


class RunConfig(Section):
    """One run."""

    stage: Literal["autoencoder", "language-model", "transformer"] = "autoencoder"
    seed: int = Field(0, ge=0, lt=2**63, description="everything random in a run follows from it")
    data: Data
    autoencoder: Autoencoder = Autoencoder()  # pyright: ignore[reportCallIssue]
    language_model: LanguageModel = LanguageModel()  # pyright: ignore[reportCallIssue]
    optimizer: Optimizer = Optimizer()  # pyright: ignore[reportCallIssue]
    train: Train

    @model_validator(mode="after")
    def _has_an_autoencoder(self) -> "RunConfig":
        model = self.language_model
        if self.stage == "language-model" and model.autoencoder is None and model.start is None:
            raise ValueError(
                "language_model.autoencoder is missing: train one first, and name its model directory; or name a "
                "language model to continue from, with language_model.start"
            )
        return self


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.name.removesuffix(".yaml") for path in _shipped().iterdir() if path.name.endswith(".yaml"))


def load_config(recipe: str, overrides: list[str] | None = None) -> RunConfig:
    """A shipped recipe by name, or a recipe file, with `section.key=value` overrides."""
    values = _read(recipe)
    for override in overrides or []:
        _apply(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_explain(problem) for problem in error.errors())
        raise ConfigError(f"recipe {recipe}: {problems}") from error


def to_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def save_config(config: RunConfig, directory: Path) -> None:
    """Every run directory holds the configuration that it was made with; it is a recipe file itself."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / CONFIG_FILE, to_yaml(config).encode())


def _shipped():
    return files("calm") / "recipes"


def _read(recipe: str) -> dict[str, Any]:
    if recipe in recipe_names():
        content, name = (_shipped() / f"{recipe}.yaml").read_text("utf-8"), recipe
    elif Path(recipe).is_file():
        content, name = Path(recipe).read_text("utf-8", errors="replace"), recipe
    else:
        raise ConfigError(
            f"no recipe {recipe!r}: neither a file nor one of {', '.join(recipe_names())}"
            + did_you_mean(recipe, recipe_names())
        )
    try:
        values = yaml.safe_load(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{where}: not YAML ({getattr(error, 'problem', None) or error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name} should hold sections such as 'data:', not {type(values).__name__}")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override!r} should read section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override!r}: the value is not YAML; quote it") from None
    here: Any = values
    for part in parts[:-1]:
        here = (
            here[int(part)] if _indexes(here, part) else here.setdefault(part, {}) if isinstance(here, dict) else None
        )
    last = parts[-1]
    if isinstance(here, dict):
        here[last] = value
    elif _indexes(here, last):
        here[int(last)] = value
    else:
        raise ConfigError(f"--set {override!r}: {'.'.join(parts[:-1])} has no parts to set")


def _indexes(here: Any, part: str) -> bool:
    return isinstance(here, list) and part.isdecimal() and int(part) < len(here)


def _explain(problem: Any) -> str:
    """One problem in words; an unknown key gets the nearest known one."""
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        known = _fields(problem["loc"][:-1])
        near = did_you_mean(problem["loc"][-1], known, cutoff=0.5)
        return f"unknown key {place}" + (near or f"; known are {', '.join(known)}")
    if problem["type"] == "missing":
        return f"{place} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{place}: {message}" if place else message
    return f"{place}: {message[0].lower() + message[1:]}, not {problem['input']!r}"


def _fields(path: tuple) -> list[str]:
    """The keys that a section has."""
    section: Any = RunConfig
    for part in path:
        if isinstance(part, str):
            annotation = section.model_fields[part].annotation
            section = getattr(annotation, "__args__", (annotation,))[0]
    return list(section.model_fields)
