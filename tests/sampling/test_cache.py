"""Room behind keys and values against transformers' own cache, which copies everything at every step."""

import pytest
import torch
from transformers import DynamicCache

from calm.sampling.cache import ROOM, RoomyCache, transformers_cache


def states(length: int, seed: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(rows, 3, length, 4, generator=generator) for _ in range(2))
    return keys, values


def both(lengths: list[int], change=lambda states: states, at: int = -1):
    """A roomy cache and a plain one that were given the same; their states are changed before one of the updates."""
    caches = transformers_cache(), DynamicCache()
    alone = RoomyCache(1)
    for number, length in enumerate(lengths):
        given = states(length, number, 1 if -1 < at <= number else 2)
        for cache in (*caches, alone):
            if number == at:
                layer = cache.layers[0]
                layer.keys, layer.values = change(layer.keys), change(layer.values)
        found = [*(cache.update(*given, 0) for cache in caches), alone.layers[0].update(*given)]
        for ours, plain, without_transformers in zip(*found, strict=True):
            assert torch.equal(ours, plain)
            assert torch.equal(without_transformers, plain)
        assert alone.get_seq_length() == caches[1].get_seq_length()
    return caches


def test_it_holds_what_a_plain_cache_holds():
    ours, plain = both([5, *[1] * (3 * ROOM), 7])
    assert ours.get_seq_length() == plain.get_seq_length() == 12 + 3 * ROOM


def test_a_step_copies_nothing_while_there_is_room():
    cache = transformers_cache()
    cache.update(*states(5, 0), 0)
    places = set()
    for number in range(ROOM):
        keys, values = cache.update(*states(1, number), 0)
        places |= {keys.data_ptr(), values.data_ptr()}
    assert len(places) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda states: states[1:],  # a text leaves
        lambda states: states[1:, :, 2:],  # and its places with it
        lambda states: torch.nn.functional.pad(states[:1], (0, 0, 3, 0)),
    ],
)
def test_what_others_put_in_its_place_counts(change):
    both([5, 1, 1, 1, 1], change, at=2)


def test_fronts_that_were_handed_out_stay_as_they_were():
    """A view that somebody kept is written over by nobody, also if another takes the room behind it."""
    cache = transformers_cache()
    first, _ = cache.update(*states(5, 0), 0)
    kept, copy = first, first.clone()
    cache.update(*states(1, 1), 0)
    cache.layers[0].keys = kept  # back to where it was: the room has moved on
    again, _ = cache.update(*states(1, 2), 0)
    assert torch.equal(kept, copy)
    assert torch.equal(again[..., 5:, :], states(1, 2)[0])


def test_batches_begin_anew():
    cache = transformers_cache()
    cache.update(*states(5, 0), 0)
    cache.reset()
    keys, _ = cache.update(*states(2, 1), 0)
    assert torch.equal(keys, states(2, 1)[0])
