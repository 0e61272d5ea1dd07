"""Bounds of a CALM model's likelihood: each chunk's tokens under the mixture of N latents (sampling/mixture.py).

The mean of -log over draws of the latents is never below the model's own nats, and comes closer as N grows.
"""

import torch
from torch import Tensor

from calm.models.calm import CalmForCausalLM
from calm.noise import RowNoise
from calm.sampling.mixture import Mixture, mixture_nats
from calm.sampling.next_chunk import softmaxes
from calm.sampling.predictor import CalmPredictor, readable
from calm.sampling.vocabulary import search_of
from calm.scores.vocabulary import nearest_words

ROOM = 2**22  # numbers of a row held at once


def chunk_nats(model: CalmForCausalLM, hidden: Tensor, chunks: Tensor, num_latents: int, noise: RowNoise) -> Tensor:
    """At most what the model pays for chunks (B, L, K) behind states (B, L, H), in nats a token: (B, L, K)."""
    words = model.words
    if model.config.is_chain:  # it has likelihoods of its own
        states = model.chain_states(hidden, chunks).flatten(0, -2)
        return nearest_words(states, words, chunks.flatten())[1].view(chunks.shape)
    at_once = max(1, ROOM // (chunks[0].numel() * words.shape[1]))  # whatever rows there are: noise comes in this order
    each = []
    for first in range(0, num_latents, at_once):
        latents = model.draw_latents(hidden, min(at_once, num_latents - first), noise)  # (n, B, L, Z)
        states = model.autoencoder.decoder(latents)  # (n, B, L, K, d)
        targets = chunks.expand(len(latents), *chunks.shape)
        each.append(nearest_words(states.flatten(0, -2), words, targets.flatten())[1].view(targets.shape))
    return mixture_nats(torch.cat(each))


@torch.no_grad()
def continuation_nats(
    model: CalmForCausalLM, before: list[int], behind: list[int], num_latents: int, noise: RowNoise, pad_token_id: int
) -> tuple[float, bool]:
    """At most what the tokens `behind` some others cost, and whether each is the likeliest of the mixture.

    The border between the two is a chunk border; of the last chunk only the tokens that are there count.
    """
    size, device = model.config.chunk_size, model.device
    if not behind:
        return 0.0, True
    before = readable(CalmPredictor(model), before)
    ids = [pad_token_id] * (-len(before) % size) + before + behind
    first = (len(ids) - len(behind)) // size  # the first chunk to score
    whole = torch.tensor(ids[: (len(ids) - 1) // size * size], device=device)
    hidden = model.hidden_states(whole[None])[0, first - 1 :]  # a state for each chunk to score
    targets = torch.tensor(behind + [0] * (-len(behind) % size), device=device).view(-1, size)
    counted = (torch.arange(targets.numel(), device=device) < len(behind)).view_as(targets)
    nats, likeliest = 0.0, True
    rows = max(1, ROOM // (num_latents * model.config.vocab_size))
    for start in range(0, len(targets), rows):
        here = slice(start, start + rows)
        shared = RowNoise([])
        shared.generators = noise.generators * len(targets[here])  # one text, one generator
        mixture = Mixture(softmaxes(model, search_of(model.autoencoder), hidden[here], shared, num_latents))
        for tokens, real in zip(targets[here].unbind(1), counted[here].unbind(1), strict=True):
            found = mixture.next()
            nats -= float(found.gather(1, tokens[:, None])[real].sum())
            likeliest &= bool((found.argmax(1) == tokens)[real].all())
            mixture.take(tokens)
    return nats, likeliest
