"""Cross-entropy, argmax, and sampling over a vocabulary without ever holding all (tokens × V) logits.

The logits of a slice of tokens are computed, turned into what is needed of them, and dropped. The loss computes its
gradient in the same pass, so that the backward pass only scales it.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from calm.noise import pick

SLICE_ELEMENTS = 2**24  # logits held at once on a CPU: 64 MB in fp32
GPU_ELEMENTS = 2**27  # on a GPU: each slice adds to the whole gradient of the vocabulary, so there should be few

Projection = Callable[[Tensor, Tensor], Tensor]  # states (n, d), token vectors (V, d) → logits (n, V)


class VocabularySubset(NamedTuple):
    """Tokens that stand for the whole vocabulary in the normalizer of a softmax (sampled softmax)."""

    ids: Tensor  # (S,), sorted; contains every target
    weights: Tensor  # (S,): how many tokens of the vocabulary each one stands for

    def to(self, device: torch.device) -> "VocabularySubset":
        return VocabularySubset(*(part.to(device, non_blocking=True) for part in self))


def vocabulary_cross_entropy(
    states: Tensor,
    vocabulary: Tensor,
    targets: Tensor,
    weights: Tensor,
    subset: VocabularySubset | None = None,
    project: Projection = F.linear,
) -> Tensor:
    """Weighted sum of cross-entropies.

    Args:
        states: (n, d).
        vocabulary: token vectors (V, d); the logits are `states @ vocabulary.T`.
        targets: token ids (n,).
        weights: (n,), usually one over the number of tokens.
        subset: estimate the normalizer from these tokens, at the cost of their number.
        project: how logits are computed; a function, or the `forward` of a module: hooks cannot run in here.

    Returns:
        Σ weight · -log softmax(logits)[target], a scalar.
    """
    importance = None
    if subset is not None:
        vocabulary, targets = vocabulary[subset.ids], torch.searchsorted(subset.ids, targets)
        importance = subset.weights.log()
    if torch.is_autocast_enabled(states.device.type):
        dtype = torch.get_autocast_dtype(states.device.type)
        states, vocabulary = states.to(dtype), vocabulary.to(dtype)
    return cast(Tensor, _SlicedCrossEntropy.apply(states, vocabulary, targets, weights, importance, project))


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        states: Tensor,
        vocabulary: Tensor,
        targets: Tensor,
        weights: Tensor,
        importance: Tensor | None,
        project: Projection,
    ) -> Tensor:
        of_states, of_vocabulary = ctx.needs_input_grad[:2]
        grad_states = torch.empty_like(states) if of_states else None
        grad_vocabulary = torch.zeros_like(vocabulary, dtype=torch.float32) if of_vocabulary else None
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        for here in _slices(len(targets), vocabulary):
            with torch.autocast(states.device.type, enabled=False):
                logits = project(states[here], vocabulary).float()  # (rows, V)
                index = targets[here, None]
                chosen = logits.gather(1, index)[:, 0]
                if importance is not None:
                    logits = logits.add_(importance)
                normalizer = logits.logsumexp(-1)
                total += ((normalizer - chosen) * weights[here]).sum()
                if not (of_states or of_vocabulary):
                    continue
                gradient = logits.sub_(normalizer[:, None]).exp_()  # the probabilities, until the next line
                gradient.scatter_add_(1, index, gradient.new_full(index.shape, -1.0))
                gradient = gradient.mul_(weights[here, None]).to(states.dtype)
                if grad_states is not None:
                    grad_states[here] = project(gradient, vocabulary.T)
                if grad_vocabulary is not None and gradient.dtype == torch.float32:
                    grad_vocabulary.addmm_(gradient.T, states[here])  # needs no second matrix of the same size
                elif grad_vocabulary is not None:
                    grad_vocabulary += (gradient.T @ states[here]).float()
        if grad_vocabulary is not None:
            grad_vocabulary = grad_vocabulary.to(vocabulary.dtype)
        ctx.save_for_backward(grad_states, grad_vocabulary)
        return total

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        of_states, of_vocabulary = (None if g is None else g * grad_outputs[0] for g in ctx.saved_tensors)
        return of_states, of_vocabulary, None, None, None, None


@torch.no_grad()
def token_losses(states: Tensor, vocabulary: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable token of each state, and the cross-entropy of its target: (n, d), (V, d), (n,) → (n,), (n,)."""
    ids, losses = torch.empty_like(targets), torch.empty(len(targets), device=states.device)
    for here, logits in _sliced_logits(states, vocabulary):
        ids[here] = logits.argmax(-1)
        losses[here] = logits.logsumexp(-1) - logits.gather(1, targets[here, None])[:, 0]
    return ids, losses


@torch.no_grad()
def most_probable_tokens(states: Tensor, vocabulary: Tensor, project: Projection = F.linear) -> Tensor:
    """Argmax over the vocabulary: (n, d), (V, d) → (n,)."""
    ids = torch.empty(len(states), dtype=torch.long, device=states.device)
    for here, logits in _sliced_logits(states, vocabulary, project):
        ids[here] = logits.argmax(-1)
    return ids


@torch.no_grad()
def sample_tokens(states: Tensor, vocabulary: Tensor, uniform: Tensor, project: Projection = F.linear) -> Tensor:
    """Tokens drawn from softmaxes by uniform numbers: (n, d), (V, d), (n, m) → (n, m)."""
    ids = torch.empty(uniform.shape, dtype=torch.long, device=states.device)
    for here, logits in _sliced_logits(states, vocabulary, project):
        ids[here] = pick(logits.softmax(-1), uniform[here])
    return ids


def _sliced_logits(
    states: Tensor, vocabulary: Tensor, project: Projection = F.linear
) -> Iterator[tuple[slice, Tensor]]:
    for here in _slices(len(states), vocabulary):
        yield here, project(states[here], vocabulary).float()


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """The number of rows of this many logits, usually a vocabulary, that are held at once."""
    return max(1, (SLICE_ELEMENTS if device.type == "cpu" else GPU_ELEMENTS) // vocab_size)


def _slices(length: int, vocabulary: Tensor) -> Iterator[slice]:
    rows = rows_at_once(len(vocabulary), vocabulary.device)
    for start in range(0, length, rows):
        yield slice(start, start + rows)
