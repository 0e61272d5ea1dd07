"""Run configurations: typed, strict, documented. Defaults, then a recipe file, then `--set section.key=value`."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from yaml.composer import ComposerError

from calm.autoencoder import AutoencoderSettings
from calm.errors import ConfigError, did_you_mean, one_line
from calm.files import write_atomic
from calm.heads import HEADS
from calm.model import head_fields

Share = Annotated[float, Field(ge=0, le=1)]
CONFIG_FILE = "config.yaml"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DataSet(Section):
    path: Path = Field(description="a directory made by calm prepare")
    weight: float = Field(1.0, gt=0, description="share of the rows, relative to the other sets")


class Data(Section):
    """Which data is read, and how it is cut into rows."""

    sets: list[DataSet] = Field(min_length=1, description="prepared sets; several are mixed by weight")
    chunk_size: int = Field(4, ge=1, description="K, tokens per chunk")
    sequence_length: int = Field(512, ge=1, description="predicted tokens per row; a multiple of chunk_size")
    batch_size: int = Field(32, ge=1, description="rows per step, over all processes")
    align_documents: bool = Field(False, description="pad documents to whole chunks instead of packing them")
    front_padding: Share = Field(1.0, description="share of rows that start with 0 to K-1 padding tokens")
    verify: bool = Field(True, description="compare the shards' checksums when opening them")

    @model_validator(mode="after")
    def _whole_chunks(self) -> "Data":
        if self.sequence_length % self.chunk_size:
            raise ValueError(
                f"sequence_length must be a multiple of chunk_size, but {self.sequence_length} is not a multiple of "
                f"{self.chunk_size}"
            )
        return self


class Autoencoder(AutoencoderSettings):
    """The autoencoder of §2; the defaults are the paper's for K = 4."""

    vocabulary_sample: int | None = Field(
        None,
        ge=0,
        description="estimate the training loss from the batch's tokens and this many random ones; null: use all",
    )


class LanguageModel(Section):
    """The language model of §3, and the fields of its head; a Transformer uses only `start` and `backbone`."""

    model_config = ConfigDict(
        extra="allow", frozen=True, validate_default=True
    )  # extra: the head's fields, checked below

    autoencoder: Path | None = Field(None, description="directory of a trained autoencoder")
    start: Path | None = Field(None, description="directory of a language model to continue from, as it is")
    backbone: Path | dict[str, Any] = Field(
        {}, description="fields of a transformers config (model_type: llama by default), or a pretrained directory"
    )
    model_input: Literal["discrete", "continuous", "both"] = Field("discrete", description="Table 5 of the paper")
    init_embedding_from_autoencoder: bool = Field(False, description="start the token embedding from the autoencoder's")
    head: str = Field("energy", description="one of calm.heads.HEADS")
    num_head_layers: int | None = Field(None, ge=1, description="blocks; null: a quarter of the backbone's layers")
    teacher: Path | None = Field(
        None, description="directory of a language model to distill: chunks that it samples are targets, too"
    )
    num_teacher_samples: int = Field(8, ge=1, description="M, chunks that the teacher samples at a position")
    teacher_stride: int = Field(4, ge=1, description="every how many positions the teacher samples")
    teacher_weight: Share = Field(1.0, description="weight of the teacher's samples; the true chunk has the rest")
    vocabulary_sample: int | None = Field(
        None,
        ge=1,
        description="for heads whose training loss sums over the vocabulary: estimate it from the batch's tokens and "
        "this many random ones, which stand for the rest; null: use all",
    )

    @model_validator(mode="before")
    @classmethod
    def _head_fields(cls, values: Any) -> Any:
        """Fields of the chosen head get their defaults; fields of other heads are dropped, unknown ones refused."""
        if not isinstance(values, dict):
            return values
        head = values.get("head", "energy")
        if head not in list(HEADS):  # a list, since a value that a user wrote may not be hashable
            raise ValueError(f"head must be one of {', '.join(HEADS)}, not {head!r}{did_you_mean(head, HEADS)}")
        own = {name: value for name, value in values.items() if name in cls.model_fields}
        try:
            chosen, unknown = head_fields(head, {n: v for n, v in values.items() if n not in own})
        except ConfigError as error:
            raise ValueError(str(error)) from error
        for name in unknown:
            known = [*cls.model_fields, *chosen]
            raise ValueError(f"unknown key {name}{did_you_mean(name, known)}")
        return own | chosen

    @property
    def head_settings(self) -> dict[str, Any]:
        """The fields of the head."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _start_stands_alone(self) -> "LanguageModel":
        if self.start is not None:
            default = LanguageModel(head=self.head)  # pyright: ignore[reportCallIssue]
            of_the_training = {"start", "vocabulary_sample", *(n for n in LanguageModel.model_fields if "teacher" in n)}
            of_the_model = {*LanguageModel.model_fields, *self.head_settings} - of_the_training
            changed = [n for n in of_the_model if getattr(self, n) != getattr(default, n)]
            if self.head != LanguageModel.model_fields["head"].default:
                changed.append("head")
            if changed:
                raise ValueError(f"start uses the model as it is, so {', '.join(sorted(changed))} cannot be set")
        return self


class Optimizer(Section):
    """AdamW with the paper's settings (§7.1)."""

    learning_rate: float = Field(3e-4, gt=0)
    warmup_steps: int = Field(2000, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = Field("constant", description="learning rate after the warm-up")
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, description="for matrices only")
    gradient_clip: float = Field(1.0, gt=0, description="maximum norm of the gradient")


class Train(Section):
    """The loop."""

    steps: int = Field(ge=1)
    accumulation: int = Field(1, ge=1, description="micro-batches per step and process")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of the computation; weights stay in fp32")
    compile: bool = Field(False, description="torch.compile, layer by layer; needs a C++ compiler on CPU")
    shard_size: int | None = Field(
        None,
        ge=1,
        description="processes that share one copy of the model, for example those of a node (HSDP); null: all (FSDP)",
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute the backbone's activations: less memory, more time"
    )
    log_every: int = Field(10, ge=1)
    evaluate_every: int = Field(500, ge=1)
    evaluation_batches: int = Field(50, ge=1)
    checkpoint_every: int = Field(500, ge=1)
    keep_checkpoints: int = Field(2, ge=1, description="how many of the latest to keep, besides the best")
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


def recipe_summary(name: str) -> str:
    """The first line of a shipped recipe: what it trains on which data, for how long on what hardware."""
    return (_shipped() / f"{name}.yaml").read_text("utf-8").partition("\n")[0].removeprefix("# ")


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


def changed_values(config: RunConfig) -> dict[str, Any]:
    """The fields that differ from their defaults, as JSON values."""
    values = config.model_dump(mode="json", exclude_defaults=True)
    default = LanguageModel(head=config.language_model.head).head_settings  # pyright: ignore[reportCallIssue]
    model = {n: v for n, v in values.get("language_model", {}).items() if n not in default or v != default[n]}
    return {name: value for name, value in {**values, "language_model": model}.items() if value != {}}


def save_config(config: RunConfig, directory: Path) -> None:
    """Every run directory holds the configuration that it was made with; it is a recipe file itself."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / CONFIG_FILE, to_yaml(config).encode())


def _shipped():
    return files("calm") / "recipes"


class _Loader(yaml.SafeLoader):
    """Refuses aliases: a few of them, one inside the other, stand for more values than fit in memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            problem = f"found the alias *{event.anchor}, and recipes have none; write the value itself"
            raise ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)


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
        values = yaml.load(content, _Loader)
    except Exception as error:  # PyYAML raises errors of many types for invalid values, such as !!int ''
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{where}: not YAML ({getattr(error, 'problem', None) or one_line(error)})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name} should hold sections such as 'data:', not {type(values).__name__}")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override!r} should read section.key=value")
    try:
        value = yaml.load(text, _Loader)
    except Exception:  # see `_read`
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
