"""`calm evaluate` for language models: BrierLM of one, or of several side by side on the same positions."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from calm.data.tokenizer import load_tokenizer
from calm.distributed import World
from calm.errors import ConfigError, DataError, UserError
from calm.evaluate.brier_lm import Score
from calm.evaluate.estimators import MOST_BRANCHES, MOST_DRAWS, CalmEstimator, SoftmaxEstimator
from calm.evaluate.evaluation import Estimator, Found, Positions, evaluate_documents, likelihood_measures
from calm.evaluate.text import Text
from calm.evaluate.windows import Document
from calm.models.configuration import CalmConfig
from calm.models.directories import model_type
from calm.models.int8 import to_int8
from calm.models.loading import load_calm, load_softmax
from calm.scores.brier import LONGEST

Report = Callable[[str, int, int | None], None]  # a model's name, tokens that are done, and all where they are known
CONTEXT = 512  # tokens that a window reads, where the models' positions allow it
ROOM = 2**27  # numbers of the largest tensor: half a gigabyte


@dataclass(frozen=True)
class Options:
    num_samples: int = 2
    positions: Positions = "shared"
    context: int | None = None  # tokens; a multiple of every K
    batch_size: int = 8
    seed: int = 0
    num_latents: int = 0  # of the mixture that bounds a CALM model's likelihood; 0: no bound
    most_tokens: int | None = None  # of the text: documents behind so many are left out
    int8: bool = False  # matrices in eight bits
    stride: int = 1  # shared starts are multiples of this, too: so that runs of their own have the same positions
    keep_sums: bool = False  # tell the sums of each document, too: paired comparisons can be made from them later


@dataclass(frozen=True)
class Contender:
    """A saved model that is scored; its weights are read when its turn comes."""

    directory: Path
    name: str

    @cached_property
    def is_calm(self) -> bool:
        return model_type(self.directory) == CalmConfig.model_type

    @cached_property
    def config(self) -> Any:
        try:
            return AutoConfig.from_pretrained(self.directory)
        except Exception as error:  # transformers raises many kinds for a broken file
            raise UserError(f"the config.json in {self.directory} cannot be read: {error}") from error

    @property
    def chunk_size(self) -> int:
        return self.config.chunk_size if self.is_calm else 1

    @property
    def longest(self) -> int | None:
        """Tokens that fit its positions and, so that all of them are seen, its attention's window."""
        inner = self.config.backbone_config if self.is_calm else self.config.get_text_config()
        limits = (getattr(inner, name, None) for name in ("max_position_embeddings", "sliding_window"))
        return min((limit * self.chunk_size for limit in limits if limit), default=None)

    @property
    def vocab_size(self) -> int:
        return (self.config if self.is_calm else self.config.get_text_config()).vocab_size

    def read(self, text: Text, most_tokens: int | None = None) -> Iterator[Document]:
        """The documents, whose ids must be words of the model; none that begins behind `most_tokens`."""
        before = 0
        for document in text.documents():
            if most_tokens is not None and before >= most_tokens:
                return
            before += len(document.tokens)
            if len(document.tokens) and (word := int(document.tokens.max())) >= self.vocab_size:
                raise DataError(
                    f"the text has token {word}, and the model in {self.directory} knows {self.vocab_size} only: the "
                    "tokenizer beside it is not its own"
                )
            yield document

    def load(self, options: Options, length: int, world: World) -> Estimator:
        model: Any = load_calm(self.directory) if self.is_calm else load_softmax(self.directory)
        for name, parameter in model.named_parameters():
            if not bool(parameter.isfinite().all()):
                raise UserError(f"the weights in {self.directory} are damaged: {name} has values that are not finite")
        model = model.to(world.device).eval()
        if options.int8:
            to_int8(model)
        if self.is_calm:
            latents = int(options.positions != "every") if model.config.is_chain else options.num_latents
            estimator = CalmEstimator(model, length, options.num_samples, latents)
        else:
            estimator = SoftmaxEstimator(model, length, options.num_samples)
        with torch.no_grad():
            estimator.check()
        return estimator


def evaluate_language_models(
    directories: list[Path],
    data: Path,
    split: str,
    options: Options,
    world: World,
    report: Report = lambda name, tokens, total: None,
) -> dict[str, Any]:
    """Scores of every model, and of each pair the difference with its paired interval."""
    if options.num_latents and options.positions == "every":
        raise ConfigError("a bound of the likelihood counts every token once; score it without --positions every")
    if options.num_samples < 2:
        raise ConfigError(f"a collision takes two: samples must be at least 2, not {options.num_samples}")
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise ConfigError("a model cannot be compared with itself: a directory is named twice")
    contenders = [Contender(directory, name) for directory, name in zip(directories, _names(directories), strict=True)]
    unit = math.lcm(options.stride, *(contender.chunk_size for contender in contenders))
    length = _length(contenders, unit, options.context)
    tokenizers = [load_tokenizer(str(directory)) for directory in directories]
    if len({tokenizer.sha256 for tokenizer in tokenizers}) > 1:
        raise DataError("the models have different tokenizers: scores of different tokens cannot be compared")
    text = Text(data, split, tokenizers[0])
    found = {c.name: _evaluate(c, text, options, unit, length, world, report) for c in contenders}
    return _answer(found, contenders, text, options, unit, length)


def _evaluate(
    contender: Contender, text: Text, options: Options, unit: int, length: int, world: World, report: Report
) -> Found:
    """What all processes together find about one model."""
    done = 0

    def tell(tokens: int) -> None:
        nonlocal done
        done += tokens * world.size
        total = text.tokens and min(text.tokens, options.most_tokens or text.tokens)
        report(contender.name, done, total)

    found = evaluate_documents(
        contender.load(options, length, world),
        contender.read(text, options.most_tokens),
        positions=options.positions,
        unit=unit,
        pad_token_id=text.tokenizer.pad_token_id if contender.is_calm else 0,
        batch_size=_batch_size(options, contender, length),
        seed=options.seed,
        device=world.device,
        rank=world.rank,
        world_size=world.size,
        report=tell,
    )
    for rank, (brier, likelihood) in enumerate(world.all_gather((found.brier, found.likelihood))):
        if rank != world.rank:
            found.brier.merge([brier])
            found.likelihood.merge(likelihood)
    return found


def _names(directories: list[Path]) -> list[str]:
    """The shortest that tell models apart: runs are named, the `model` in them is not."""
    short = [(d.parent if d.name == "model" else d).name for d in directories]
    return [name if name and short.count(name) == 1 else str(d) for name, d in zip(short, directories, strict=True)]


def _length(contenders: list[Contender], unit: int, context: int | None) -> int:
    room = min((c.longest for c in contenders if c.longest is not None), default=CONTEXT + LONGEST)
    most = (room - LONGEST) // unit * unit  # a continuation needs positions, too
    wanted = context if context is not None else min(max(CONTEXT // unit, 1) * unit, most)
    if wanted < unit or wanted % unit or wanted > most:
        raise ConfigError(f"a context of {wanted} tokens should be a multiple of {unit}, at most {most}")
    return wanted


def _batch_size(options: Options, contender: Contender, length: int) -> int:
    """So many windows that the largest tensor fits: states of samples, or a softmax of every position or branch."""
    if contender.is_calm:
        row = min(options.num_samples, MOST_DRAWS) * length // contender.chunk_size * 8 * contender.config.hidden_size
    else:
        row = max(length, min(options.num_samples // 2 * length, MOST_BRANCHES)) * contender.vocab_size
    return max(1, min(options.batch_size, ROOM // row))


def _answer(
    found: dict[str, Found], contenders: list[Contender], text: Text, options: Options, unit: int, length: int
) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "data": str(text.data),
        "split": text.split if text.prepared is not None else None,
        "positions": _described(options.positions, unit),
        "samples": options.num_samples,
        "context": length,
        "seed": options.seed,
        "latents": options.num_latents or None,
        "models": {},
        "differences": {},
        "warnings": [],
    }
    for contender in contenders:
        each = found[contender.name]
        measures: dict[str, Any] = {"chunk_size": contender.chunk_size if contender.is_calm else None}
        measures |= _plain(each.brier.compute(options.seed))
        if options.keep_sums:
            measures["sums"] = each.brier.as_json()
        if each.likelihood.tokens:
            likelihood = likelihood_measures(each.likelihood, text.tokens or 0, text.bytes)
            bound = "_bound" if contender.is_calm and not contender.config.is_chain else ""
            measures |= {name + bound: value for name, value in likelihood.items()}
        answer["models"][contender.name] = measures
        answer["warnings"] += [f"{contender.name}: {warning}" for warning in each.brier.warnings()]
    if options.positions != "own" or len({contender.chunk_size for contender in contenders}) == 1:
        for first, second in combinations(found, 2):
            difference = found[first].brier.compare(found[second].brier, options.seed)
            answer["differences"][f"{first} - {second}"] = _plain(difference)
    return answer


def _described(positions: Positions, unit: int) -> str:
    return {
        "shared": f"starts at multiples of {unit}, which all models share",
        "own": "each model's own chunk borders",
        "every": "every token",
    }[positions]


def _plain(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: asdict(score) if isinstance(score, Score) else score for name, score in scores.items()}
