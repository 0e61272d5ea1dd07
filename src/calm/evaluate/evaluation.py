"""BrierLM of a model on documents: which positions, in which windows, with which noise.

    shared   starts that all compared models have: multiples of every K (default)
    own      every chunk boundary of the model itself; for a softmax model every token
    every    every token; a CALM model reads the text K times, shifted by 0 … K-1 padding tokens at its front

The noise of a window follows from the seed and the window's number, so neither batches nor processes change a score.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from calm.errors import ConfigError, DataError, UserError
from calm.evaluate.brier_lm import BrierLM
from calm.evaluate.documents import Document, Window, windows_of
from calm.noise import RowNoise
from calm.scores.brier import MAX_NGRAM, accuracy_and_collision
from calm.seeds import SeedStream, row_seeds

Positions = Literal["shared", "own", "every"]


class Estimator(Protocol):
    chunk_size: int
    length: int

    def estimate(self, tokens: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor, Tensor | None]: ...


@dataclass
class Likelihood:
    """Negative log-likelihood of all tokens but a document's first chunk, in nats."""

    nats: float = 0.0
    tokens: int = 0

    def add(self, nats: Tensor, batch: Sequence[Window], first: int) -> None:
        """`first` is the position of the first token that has a likelihood."""
        for row, window in zip(nats, batch, strict=True):
            known = max(0, min(len(window.tokens) - first, len(row)))
            self.nats += row[:known].double().sum().item()
            self.tokens += known


@dataclass
class Evaluation:
    brier: BrierLM = field(default_factory=BrierLM)
    likelihood: Likelihood = field(default_factory=Likelihood)

    def merge(self, other: "Evaluation") -> None:
        """Add the sums of another process."""
        self.brier.merge([other.brier])
        self.likelihood.nats += other.likelihood.nats
        self.likelihood.tokens += other.likelihood.tokens


@torch.no_grad()
def evaluate_documents(
    estimator: Estimator,
    documents: Iterable[Document],
    *,
    positions: Positions = "shared",
    unit: int = 1,
    pad_token_id: int = 0,
    batch_size: int = 8,
    seed: int = 0,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    report: Callable[[int], None] = lambda tokens: None,
) -> Evaluation:
    """Score every start; with `positions="shared"` every `unit` tokens. Windows are distributed over the processes."""
    size, evaluation = estimator.chunk_size, Evaluation()
    stride = unit if positions == "shared" else size
    if unit % size or estimator.length % stride:
        raise ConfigError(
            f"start positions every {unit} tokens must be a multiple of the chunk size, {size}, and the context of "
            f"{estimator.length} tokens a multiple of {stride}"
        )
    shifts = range(size if positions == "every" else 1)
    windows = windows_of(documents, estimator.length, shifts, pad_token_id)
    for batch in _batches(islice(windows, rank, None, world_size), batch_size):
        tokens = np.full((len(batch), estimator.length + MAX_NGRAM), pad_token_id, dtype=np.int64)
        for row, window in zip(tokens, batch, strict=True):
            row[: len(window.tokens)] = window.tokens
        noise = RowNoise(row_seeds(np.array([window.number for window in batch]), seed, SeedStream.EVALUATION), device)
        accuracy, collision, nats = estimator.estimate(torch.from_numpy(tokens).to(device), noise)
        if not bool(accuracy.isfinite().all() & collision.isfinite().all()):
            raise UserError(
                "the model's probabilities are not finite (NaN or inf): check its weights, or try --dtype fp32"
            )
        starts = np.arange(size, estimator.length + 1, size)
        lengths = np.array([[len(window.tokens)] for window in batch])
        scored = torch.from_numpy((starts % stride == 0) & (starts + MAX_NGRAM <= lengths)).to(device)
        names = torch.tensor([[window.document] for window in batch], device=device).expand_as(scored)
        evaluation.brier.add(names[scored], accuracy[scored], collision[scored])
        if nats is not None:
            evaluation.likelihood.add(nats, batch, size)
        report(int(lengths.clip(max=estimator.length).sum()) // len(shifts))
    return evaluation


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def evaluate_sampler(
    draw_continuations: Callable[[list[list[int]], int], Any],
    documents: Iterable[Sequence[int]],
    *,
    num_samples: int = 2,
    stride: int = MAX_NGRAM,
    batch_size: int = 64,
) -> BrierLM:
    """BrierLM of anything that can continue a text.

    Args:
        draw_continuations: draw_continuations(prefixes, num_samples) takes lists of token ids and returns ids
            (len(prefixes), num_samples, 4), all sampled independently.
        documents: token ids of each document.
        num_samples: continuations per prefix, at least 2.
        stride: scores start at `stride`, 2·stride, … of every document.
        batch_size: prefixes per call.

    Example:
        >>> scores = evaluate_sampler(my_model.sample, documents, num_samples=4).compute()
        >>> scores["brier_lm"].value, scores["brier_lm"].standard_error
    """
    if num_samples < 2:
        raise ConfigError(f"num_samples must be at least 2 to measure collisions, not {num_samples}")
    if stride < 1:
        raise ConfigError(f"stride must be at least 1, not {stride}")
    brier = BrierLM()

    def places() -> Iterator[tuple[int, list[int], list[int]]]:
        for number, document in enumerate(documents):
            tokens = [int(token) for token in document]
            for start in range(stride, len(tokens) - MAX_NGRAM + 1, stride):
                yield number, tokens[:start], tokens[start : start + MAX_NGRAM]

    for batch in _batches(places(), batch_size):
        names, prefixes, targets = zip(*batch, strict=True)
        drawn = torch.as_tensor(draw_continuations(list(prefixes), num_samples)).cpu()
        expected = (len(batch), num_samples, MAX_NGRAM)
        if drawn.shape != expected or drawn.is_floating_point():
            raise DataError(
                f"draw_continuations should return integers of shape {expected}, not {drawn.dtype} of "
                f"{tuple(drawn.shape)}"
            )
        accuracy, collision = accuracy_and_collision(drawn.movedim(1, 0), torch.tensor(targets))
        brier.add(torch.tensor(names), accuracy, collision)
    return brier


def likelihood_measures(likelihood: Likelihood, tokens: int, text_bytes: int) -> dict[str, float]:
    """Cross-entropy in nats per token, perplexity, and bits per byte of a text, given its tokens and bytes."""
    nats = likelihood.nats / max(likelihood.tokens, 1)
    return {
        "cross_entropy": nats,
        "perplexity": math.exp(min(nats, 700.0)),
        "bits_per_byte": nats * tokens / math.log(2) / max(text_bytes, 1),
    }
