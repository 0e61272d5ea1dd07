"""`calm evaluate` for language models: BrierLM of one model, or of several on the same positions."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from calm.checkpoint import ModelInfo, load_language_model, read_info
from calm.data.tokenizer import load_tokenizer
from calm.distributed import World, move_model
from calm.errors import ConfigError, DataError
from calm.evaluate.branches import check_branches
from calm.evaluate.brier_lm import Score
from calm.evaluate.documents import Document, EvaluationText
from calm.evaluate.estimators import PrefixEstimator, SampleEstimator, estimator_of
from calm.evaluate.evaluation import Evaluation, Positions, evaluate_documents, likelihood_measures
from calm.generate.engine import prepare_inference
from calm.scores.brier import MAX_NGRAM

Report = Callable[[str, int, int | None], None]  # a model's name, tokens done, and all tokens if known
CONTEXT = 512  # tokens per window, if the models' positions allow it
MAX_ELEMENTS = 2**27  # numbers of the largest tensor: half a gigabyte


@dataclass(frozen=True)
class Options:
    num_samples: int = 2
    positions: Positions = "shared"
    context: int | None = None  # tokens; a multiple of every K
    batch_size: int = 8
    seed: int = 0
    num_latents: int = 0  # latents of a likelihood bound; 0: none
    most_tokens: int | None = None  # documents that start after this many tokens are left out
    int8: bool = False  # quantize linear layers
    dtype: str = "auto"  # of the weights
    stride: int = 1  # shared starts are also multiples of this, so that separate runs have the same positions
    keep_sums: bool = False  # report the sums of each document, for paired comparisons later


@dataclass(frozen=True)
class Contender:
    """A saved model to evaluate; its weights are loaded when its turn comes."""

    directory: Path
    name: str

    @cached_property
    def info(self) -> ModelInfo:
        return read_info(self.directory)

    @property
    def chunk_size(self) -> int:
        return self.info.chunk_size or 1

    def read(self, text: EvaluationText, max_tokens: int | None = None) -> Iterator[Document]:
        """The documents that start before `max_tokens`, checked against the model's vocabulary."""
        before = 0
        for document in text.documents():
            if max_tokens is not None and before >= max_tokens:
                return
            before += len(document.tokens)
            if len(document.tokens) and (token := int(document.tokens.max())) >= self.info.vocab_size:
                raise DataError(
                    f"token id {token} of the text is out of range: the vocabulary of the model in {self.directory} "
                    f"has {self.info.vocab_size:,} entries; the tokenizer in its directory is not its own"
                )
            yield document

    def load(self, options: Options, length: int, world: World) -> SampleEstimator | PrefixEstimator:
        model = load_language_model(self.directory)
        check_branches(model.eval())  # in fp32: rounding would hide what it looks for
        model = move_model(model, world.device, options.dtype)
        if options.int8:
            prepare_inference(model, int8=True)
        latents = int(options.positions != "every") if model.head.exact_likelihood else options.num_latents
        return estimator_of(model, length, options.num_samples, latents)


def evaluate_language_models(
    directories: list[Path],
    data: Path,
    split: str,
    options: Options,
    world: World,
    report: Report = lambda name, tokens, total: None,
) -> dict[str, Any]:
    """Scores of every model, and the difference of each pair with its paired interval."""
    if options.num_latents and options.positions == "every":
        raise ConfigError("a likelihood bound counts every token once; compute it without --positions every")
    if options.num_samples < 2:
        raise ConfigError(f"samples must be at least 2 to measure collisions, not {options.num_samples}")
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise ConfigError("a model cannot be compared with itself: a directory is named twice")
    contenders = [Contender(directory, name) for directory, name in zip(directories, _names(directories), strict=True)]
    unit = math.lcm(options.stride, *(contender.chunk_size for contender in contenders))
    length = _length(contenders, unit, options.context)
    tokenizers = [load_tokenizer(str(directory)) for directory in directories]
    if len({tokenizer.sha256 for tokenizer in tokenizers}) > 1:
        raise DataError("the models have different tokenizers: scores of different tokens cannot be compared")
    text = EvaluationText(data, split, tokenizers[0])
    scored = {c.name: _evaluate(c, text, options, unit, length, world, report) for c in contenders}
    return _answer(scored, contenders, text, options, unit, length)


def _evaluate(
    contender: Contender, text: EvaluationText, options: Options, unit: int, length: int, world: World, report: Report
) -> tuple[Evaluation, bool]:
    """The scores of one model over all processes, and whether its likelihood is exact."""
    done = 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens * world.size
        total = text.tokens and min(text.tokens, options.most_tokens or text.tokens)
        report(contender.name, done, total)

    estimator = contender.load(options, length, world)
    evaluation = evaluate_documents(
        estimator,
        contender.read(text, options.most_tokens),
        positions=options.positions,
        unit=unit,
        pad_token_id=min(text.tokenizer.pad_token_id, contender.info.vocab_size - 1),
        batch_size=max(1, min(options.batch_size, MAX_ELEMENTS // estimator.elements_per_row())),
        seed=options.seed,
        device=world.device,
        rank=world.rank,
        world_size=world.size,
        report=count,
    )
    for rank, other in enumerate(world.all_gather(evaluation)):
        if rank != world.rank:
            evaluation.merge(other)
    return evaluation, estimator.model.head.exact_likelihood


def _names(directories: list[Path]) -> list[str]:
    """The shortest distinct names: of RUN/model it is RUN."""
    short = [(d.parent if d.name == "model" else d).name for d in directories]
    return [name if name and short.count(name) == 1 else str(d) for name, d in zip(short, directories, strict=True)]


def _length(contenders: list[Contender], unit: int, context: int | None) -> int:
    limits = [c.info.max_tokens for c in contenders if c.info.max_tokens is not None]
    longest = (min(limits, default=CONTEXT + MAX_NGRAM) - MAX_NGRAM) // unit * unit  # continuations need positions
    length = context if context is not None else min(max(CONTEXT // unit, 1) * unit, longest)
    if length < unit or length % unit or length > longest:
        raise ConfigError(f"a context of {length} tokens should be a multiple of {unit}, at most {longest}")
    return length


def _answer(
    scored: dict[str, tuple[Evaluation, bool]],
    contenders: list[Contender],
    text: EvaluationText,
    options: Options,
    unit: int,
    length: int,
) -> dict[str, Any]:
    positions = {
        "shared": f"starts at multiples of {unit}, shared by all models",
        "own": "each model's own chunk boundaries",
        "every": "every token",
    }
    answer: dict[str, Any] = {
        "data": str(text.data),
        "split": text.split if text.prepared is not None else None,
        "positions": positions[options.positions],
        "samples": options.num_samples,
        "context": length,
        "seed": options.seed,
        "latents": options.num_latents or None,
        "models": {},
        "differences": {},
        "warnings": [],
    }
    for contender in contenders:
        evaluation, exact_likelihood = scored[contender.name]
        scores: dict[str, Any] = {"chunk_size": contender.info.chunk_size}
        scores |= _plain(evaluation.brier.compute(options.seed))
        if options.keep_sums:
            scores["sums"] = evaluation.brier.as_json()
        if evaluation.likelihood.tokens:
            likelihood = likelihood_measures(evaluation.likelihood, text.tokens or 0, text.bytes)
            suffix = "" if exact_likelihood else "_bound"
            scores |= {name + suffix: value for name, value in likelihood.items()}
        answer["models"][contender.name] = scores
        answer["warnings"] += [f"{contender.name}: {warning}" for warning in evaluation.brier.warnings()]
    if options.positions != "own" or len({contender.chunk_size for contender in contenders}) == 1:
        for first, second in combinations(scored, 2):
            difference = scored[first][0].brier.compare(scored[second][0].brier, options.seed)
            answer["differences"][f"{first} - {second}"] = _plain(difference)
    return answer


def _plain(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: asdict(score) if isinstance(score, Score) else score for name, score in scores.items()}
