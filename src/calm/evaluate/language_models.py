"""`calm evaluate` for language models: BrierLM of one, or of several side by side on the same positions."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calm.data.chunks import close_document
from calm.data.corpus import BadDocument, documents, open_sources
from calm.data.shards import PreparedData
from calm.data.tokenizer import Tokenizer, load_tokenizer
from calm.errors import ConfigError, DataError, UserError
from calm.evaluate.brier_lm import Score
from calm.evaluate.estimators import CalmEstimator, SoftmaxEstimator
from calm.evaluate.evaluation import Estimator, Found, Positions, evaluate_documents, likelihood_measures
from calm.evaluate.windows import Document, documents_of
from calm.models.configuration import CalmConfig
from calm.models.loading import load_calm, load_softmax, model_type
from calm.processes import Processes
from calm.scores.brier import LONGEST

CONTEXT = 512  # tokens that a window reads, where the models' positions allow it


@dataclass(frozen=True)
class Options:
    num_samples: int = 2
    positions: Positions = "shared"
    context: int | None = None  # tokens; a multiple of the largest chunk
    batch_size: int = 8
    seed: int = 0


class Text:
    """Documents as token ids: a split of prepared data, or a file that is read and tokenized as it goes."""

    def __init__(self, data: Path, split: str, tokenizer: Tokenizer):
        self.data, self.split, self.tokenizer = data, split, tokenizer
        self.prepared = PreparedData(data) if data.is_dir() else None
        if self.prepared is not None and self.prepared.tokenizer.sha256 != tokenizer.sha256:
            raise DataError(f"{data} was prepared with another tokenizer than that of the model")

    def documents(self) -> Iterator[Document]:
        if self.prepared is not None:
            yield from documents_of(self.prepared.split(self.split))
            return
        number = 0
        for source in open_sources([str(self.data)]):
            for block in source.blocks():
                for text in documents(block):
                    if isinstance(text, BadDocument):
                        raise DataError(str(text))
                    ids = close_document(self.tokenizer.encode(text), self.tokenizer.end_id)
                    yield Document(number, np.array(ids, dtype=np.int64))
                    number += 1

    @property
    def tokens(self) -> int | None:
        """How many there are, where it is known beforehand."""
        return len(self.prepared.split(self.split)) if self.prepared is not None else None

    def bytes(self) -> int:
        if self.prepared is not None:
            return self.prepared.manifest["splits"][self.split]["bytes"]
        return sum(len(self.tokenizer.decode(document.tokens.tolist()).encode()) for document in self.documents())


def evaluate_language_models(
    directories: list[Path],
    data: Path,
    split: str,
    options: Options,
    among: Processes,
    report: Callable[[str, int, int | None], None] = lambda name, tokens, total: None,
) -> dict[str, Any]:
    """Scores of every model, and of each pair the difference with its paired interval."""
    if options.num_samples < 2:
        raise ConfigError(f"a collision takes two: samples must be at least 2, not {options.num_samples}")
    tokenizers = {load_tokenizer(str(directory)).sha256 for directory in directories}
    if len(tokenizers) > 1:
        raise DataError("the models have different tokenizers: scores of different tokens cannot be compared")
    text = Text(data, split, load_tokenizer(str(directories[0])))
    models = {_name(directory, directories): _load(directory, among) for directory in directories}
    largest = max(chunk for _, chunk, _ in models.values())
    length = _length(models, largest, options.context)
    found: dict[str, Found] = {}
    for name, (model, chunk, _) in models.items():
        kind = CalmEstimator if chunk else SoftmaxEstimator
        estimator: Estimator = kind(model, length, options.num_samples)
        done = 0

        def tell(tokens: int, name: str = name) -> None:
            nonlocal done
            done += tokens * among.size
            report(name, done, text.tokens)

        found[name] = evaluate_documents(
            estimator,
            text.documents(),
            positions=options.positions,
            largest_chunk=max(largest, 1) if options.positions == "shared" else None,
            fill_id=text.tokenizer.fill_id,
            batch_size=_batch_size(options, estimator, model),
            seed=options.seed,
            device=model.device,
            rank=among.rank,
            world_size=among.size,
            report=tell,
        )
        _gather(found[name], among)
    return _answer(found, models, text, options, largest, length)


def _name(directory: Path, directories: list[Path]) -> str:
    """The shortest name that tells a model from the others: runs are named, their `model` is not."""
    names = [d.parent.name if d.name == "model" else d.name for d in directories]
    name = directory.parent.name if directory.name == "model" else directory.name
    return name if names.count(name) == 1 and name else str(directory)


def _load(directory: Path, among: Processes) -> tuple[Any, int, int | None]:
    """A model, its K (0 for a softmax over tokens), and how many tokens its positions hold."""
    calm = model_type(directory) == CalmConfig.model_type
    model: Any = load_calm(directory) if calm else load_softmax(directory)
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise UserError(f"the weights in {directory} are damaged: {name} holds numbers that are not finite")
    chunk = model.config.chunk_size if calm else 0
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return model.to(among.device).eval(), chunk, longest and longest * max(chunk, 1)


def _length(models: dict[str, Any], largest: int, context: int | None) -> int:
    unit = max(largest, 1)
    room = min((longest for _, _, longest in models.values() if longest is not None), default=CONTEXT + LONGEST)
    most = (room - LONGEST) // unit * unit  # a continuation needs positions, too
    wanted = context if context is not None else min(CONTEXT // unit * unit or unit, most)
    if wanted < unit or wanted % unit or wanted > most:
        raise ConfigError(f"a context of {wanted} tokens should be a multiple of {unit}, at most {most}")
    return wanted


def _batch_size(options: Options, estimator: Estimator, model: Any) -> int:
    """A softmax over all branches is the largest tensor: so many windows that it stays below half a gigabyte."""
    if isinstance(estimator, CalmEstimator):
        return options.batch_size
    elements = options.num_samples * estimator.length * model.config.vocab_size
    return max(1, min(options.batch_size, 2**27 // elements))


def _gather(found: Found, among: Processes) -> None:
    """What all processes have seen, in each of them."""
    mine = (found.brier, found.likelihood)
    for rank, (brier, likelihood) in enumerate(among.gather(mine)):
        if rank != among.rank:
            found.brier.merge([brier])
            found.likelihood.nats += likelihood.nats
            found.likelihood.tokens += likelihood.tokens


def _answer(found: dict[str, Found], models: dict[str, Any], text: Text, options: Options, largest: int, length: int):
    answer: dict[str, Any] = {
        "data": str(text.data),
        "split": text.split if text.prepared is not None else None,
        "positions": _described(options.positions, largest),
        "samples": options.num_samples,
        "context": length,
        "seed": options.seed,
        "models": {},
        "differences": {},
        "warnings": [],
    }
    for name, each in found.items():
        scores = each.brier.compute(options.seed)
        answer["models"][name] = {"chunk_size": models[name][1] or None, **_plain(scores)}
        if each.likelihood.tokens:
            answer["models"][name] |= likelihood_measures(each.likelihood, text.bytes())
        answer["warnings"] += [f"{name}: {warning}" for warning in each.brier.warnings()]
    names = list(found)
    for first, second in ((a, b) for i, a in enumerate(names) for b in names[i + 1 :]):
        if options.positions != "own":
            answer["differences"][f"{first} - {second}"] = _plain(found[first].brier.compare(found[second].brier))
    return answer


def _described(positions: Positions, largest: int) -> str:
    return {
        "shared": f"starts at multiples of {max(largest, 1)}, which all models share",
        "own": "each model's own chunk borders",
        "every": "every token",
    }[positions]


def _plain(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: asdict(score) if isinstance(score, Score) else score for name, score in scores.items()}
