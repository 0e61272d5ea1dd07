"""Cross-entropy over a vocabulary without ever holding the (tokens × V) logits and their gradient.

The logits of a slice of tokens are made, turned into loss and gradient at once, and thrown away. The backward pass then
only scales what is there.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from calm.noise import pick
from calm.products import linear, long_product

SLICE_ELEMENTS = 2**24  # logits held at once: 64 MB in fp32


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, words: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        grad_states, grad_words = torch.empty_like(states), torch.zeros_like(words, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        rows = max(1, SLICE_ELEMENTS // len(words))
        for start in range(0, len(targets), rows):
            here = slice(start, start + rows)
            with torch.autocast(states.device.type, enabled=False):
                logits = linear(states[here], words).float()  # (rows, V)
            normaliser = logits.logsumexp(-1)
            index = targets[here, None]
            total += ((normaliser - logits.gather(1, index)[:, 0]) * weights[here]).sum()
            gradient = logits.sub_(normaliser[:, None]).exp_()  # the probabilities, until the next line
            gradient.scatter_add_(1, index, gradient.new_full(index.shape, -1.0))
            gradient = gradient.mul_(weights[here, None]).to(states.dtype)
            with torch.autocast(states.device.type, enabled=False):
                grad_states[here] = linear(gradient, words.T)
                if gradient.dtype == torch.float32:
                    grad_words.addmm_(gradient.T, states[here])  # no second matrix of all words
                else:
                    grad_words += (gradient.T @ states[here]).float()
        ctx.save_for_backward(grad_states, grad_words.to(words.dtype))
        return total

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_words = ctx.saved_tensors
        return grad_states * grad_outputs[0], grad_words * grad_outputs[0], None, None


def vocabulary_cross_entropy(
    states: Tensor, words: Tensor, targets: Tensor, weights: Tensor, candidates: Tensor | None = None
) -> Tensor:
    """Sum over tokens of weight · -log softmax(words @ state)[target]; states (n, d), words (V, d), targets (n,).

    With `candidates` (sorted ids that contain every target) the softmax runs over these words only: a lower bound of
    the loss over all, at the cost of their number.
    """
    if candidates is not None:
        words, targets = words[candidates], torch.searchsorted(candidates, targets)
    if torch.is_autocast_enabled(states.device.type):
        dtype = torch.get_autocast_dtype(states.device.type)
        states, words = states.to(dtype), words.to(dtype)
    return cast(Tensor, _SlicedCrossEntropy.apply(states, words, targets, weights))


@torch.no_grad()
def nearest_words(states: Tensor, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable word of each state, and -log probability of its target: (n,) and (n,)."""
    ids, losses = torch.empty_like(targets), torch.empty(len(targets), device=states.device)
    for here, logits in _logits(states, words):
        ids[here] = logits.argmax(-1)
        losses[here] = logits.logsumexp(-1) - logits.gather(1, targets[here, None])[:, 0]
    return ids, losses


@torch.no_grad()
def most_probable_words(states: Tensor, words: Tensor) -> Tensor:
    """The most probable word of each state: (n, d), (V, d) → (n,)."""
    ids = torch.empty(len(states), dtype=torch.long, device=states.device)
    for here, logits in _logits(states, words):
        ids[here] = logits.argmax(-1)
    return ids


@torch.no_grad()
def drawn_words(states: Tensor, words: Tensor, uniform: Tensor) -> Tensor:
    """Words by their probability, chosen by uniform numbers: (n, d), (V, d), (n, m) → (n, m)."""
    ids = torch.empty(uniform.shape, dtype=torch.long, device=states.device)
    for here, logits in _logits(states, words):
        ids[here] = pick(logits.softmax(-1), uniform[here])
    return ids


def _logits(states: Tensor, words: Tensor) -> Iterator[tuple[slice, Tensor]]:
    rows = max(1, SLICE_ELEMENTS // len(words))
    for start in range(0, len(states), rows):
        here = slice(start, start + rows)
        yield here, word_products(states[here], words).float()


def word_products(states: Tensor, words: Tensor) -> Tensor:
    """w·g of all words and some states: (n, d), (V, d) → (n, V)."""
    return long_product(states, words)
