"""Chunks and batches, against plain constructions of the same thing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm.data.chunks import ChunkedStream
from calm.data.loader import ROUND, Loader, evaluation_batches
from calm.data.shards import TokenStream
from calm.errors import DataError
from calm.seeds import permute

FILL, END = 2, 1


def stream_of(documents: list[list[int]], per_part: int = 3) -> TokenStream:
    """Documents, a few to a shard."""
    parts, lengths = [], []
    for start in range(0, len(documents), per_part):
        members = documents[start : start + per_part]
        parts.append(np.concatenate([np.array(d, dtype=np.uint16) for d in members]))
        lengths.append(np.array([len(d) for d in members], dtype=np.uint32))
    return TokenStream(parts, lengths)


document_lists = st.lists(
    st.lists(st.integers(10, 99), max_size=12).map(lambda ids: [*ids, END]), min_size=1, max_size=12
)


@given(document_lists, st.data())
def test_stream_reads_like_one_array(documents, data):
    stream = stream_of(documents)
    flat = sum(documents, [])
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(0, len(flat) + 3))
    assert stream[start:stop].tolist() == flat[start:stop]
    for number, document in enumerate(documents):
        first, last = stream.document_range(number)
        assert flat[first:last] == document


@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_permutation_is_a_bijection(size, seed):
    assert sorted(permute(np.arange(size), size, seed)) == list(range(size))


def test_permutations_look_random():
    """Over 2,000 keys each of five places receives each of five values equally often: chi-square with 16 degrees."""
    counts = np.zeros((5, 5))
    keys = np.repeat(np.arange(2000), 5)
    np.add.at(counts, (np.tile(np.arange(5), 2000), permute(np.tile(np.arange(5), 2000), 5, keys)), 1)
    assert ((counts - 400) ** 2 / 400).sum() < 45  # the 99.99% quantile is 44.9
    big = permute(np.arange(100_000), 100_000, 7)
    assert abs(np.corrcoef(np.arange(100_000), big)[0, 1]) < 0.02


@given(document_lists, st.integers(1, 5), st.integers(1, 4), st.data())
def test_packed_rows(documents, chunk_size, chunks, data):
    flat = sum(documents, [])
    rows = ChunkedStream(stream_of(documents), chunk_size, chunks * chunk_size, FILL)
    for index in range(len(rows)):
        fill = data.draw(st.integers(0, chunk_size - 1))
        tokens, mask = rows.row(index, fill)
        start = index * chunks * chunk_size
        expected = flat[start : start + rows.row_length - fill]
        assert tokens[mask].tolist() == expected
        assert (tokens[:fill] == FILL).all()
        assert not mask[:fill].any()
        assert mask.tolist() == [False] * fill + [True] * len(expected) + [False] * (len(mask) - fill - len(expected))
    assert start + rows.row_length >= len(flat)  # the rows reach the end of the stream


@given(document_lists, st.integers(1, 5), st.integers(1, 4))
def test_aligned_rows(documents, chunk_size, chunks):
    """Documents padded by hand to whole chunks and laid end to end, then cut."""
    padded = [d + [FILL] * (-len(d) % chunk_size) for d in documents]
    flat, real = sum(padded, []), sum(([1] * len(d) + [0] * (-len(d) % chunk_size) for d in documents), [])
    rows = ChunkedStream(stream_of(documents), chunk_size, chunks * chunk_size, FILL, align_documents=True)
    for index in range(len(rows)):
        start = index * chunks * chunk_size
        tokens, mask = rows.row(index)
        length = len(flat[start : start + rows.row_length])
        assert tokens[:length].tolist() == flat[start : start + rows.row_length]
        assert mask[:length].tolist() == [bool(m) for m in real[start : start + rows.row_length]]
        assert not mask[length:].any()
    assert start + rows.row_length >= len(flat)


@given(document_lists, st.integers(2, 5), st.data())
def test_aligned_rows_with_front_fill_keep_borders(documents, chunk_size, data):
    rows = ChunkedStream(stream_of(documents), chunk_size, 3 * chunk_size, FILL, align_documents=True)
    index = data.draw(st.integers(0, len(rows) - 1))
    fill = data.draw(st.integers(0, chunk_size - 1))
    tokens, mask = rows.row(index, fill)
    assert not mask[:fill].any()
    ends = np.flatnonzero(tokens == END)
    for end in ends:  # behind an end id, fill up to the border
        border = -(-(end + 1) // chunk_size) * chunk_size
        assert not mask[end + 1 : border].any()
    start, position = index * 3 * chunk_size, 0
    for document in documents:  # the first document's tokens stand right behind the fill
        if position <= start < position + len(document) + (-len(document) % chunk_size):
            rest = document[start - position :]
            assert tokens[fill : fill + len(rest)].tolist() == rest[: len(tokens) - fill]
        position += len(document) + (-len(document) % chunk_size)


def loaders(documents, world_size, weights=(1.0,), seed=3, **kwargs):
    streams = [ChunkedStream(stream_of(documents), 2, 8, FILL) for _ in weights]
    return [
        Loader(streams, list(weights), 12, seed, rank=r, world_size=world_size, **kwargs) for r in range(world_size)
    ]


@given(document_lists, st.integers(0, 2**30), st.sampled_from([(1.0,), (3.0, 1.0)]))
def test_the_global_batch_is_the_same_for_any_number_of_ranks(documents, step, weights):
    (alone,) = loaders(documents, 1, weights)
    whole = alone.batch(step)
    assert np.array_equal(loaders(documents, 3, weights)[1].batch_and_whole(step)[1].tokens, whole.tokens)
    for world_size in (2, 3, 4):
        parts = [loader.batch(step) for loader in loaders(documents, world_size, weights)]
        for field in range(3):
            assert np.array_equal(np.concatenate([part[field] for part in parts]), whole[field])


@given(document_lists, st.integers(0, 6))
def test_resume_at_any_step(documents, step):
    """A loader that has read everything before a step, and a new one that begins there."""
    (old,), (new,) = loaders(documents, 1), loaders(documents, 1)
    for before in range(step):
        old.batch(before)
    for ours, theirs in zip(old.batch(step), new.batch(step), strict=True):
        assert np.array_equal(ours, theirs)


def test_every_row_once_an_epoch_in_another_order():
    documents = [[10 + i, *range(100, 130), END] for i in range(60)]
    stream = ChunkedStream(stream_of(documents), 2, 8, FILL)
    loader = Loader([stream], [1.0], 1, seed=5, front_fill=0)
    epochs = [[loader.batch(e * len(stream) + i).tokens[0].tobytes() for i in range(len(stream))] for e in range(2)]
    rows = sorted(stream.row(i).tokens.tobytes() for i in range(len(stream)))
    assert sorted(epochs[0]) == sorted(epochs[1]) == rows
    assert epochs[0] != epochs[1]


def test_mixture_keeps_its_weights_and_uses_every_row():
    first, second = [[10] * 7 + [END]] * 40, [[50] * 7 + [END]] * 40
    streams = [ChunkedStream(stream_of(d), 2, 8, FILL) for d in (first, second)]
    loader = Loader(streams, [0.7, 0.3], ROUND // 4, front_fill=0)
    of_first = sum((loader.batch(step).tokens[:, 0] < 50).sum() for step in range(4))
    assert of_first == 700
    sets, places = loader._places(np.arange(3 * ROUND))
    assert sorted(places[sets == 1]) == list(range(900))  # rows of a set follow one another without a gap


def test_front_fill_is_uniform_and_has_the_share():
    (loader,) = loaders([[10] * 50 + [END]], 1, front_fill=0.5)
    rows = np.arange(20_000)
    fills = loader._fills(rows)
    assert set(fills) == {0, 1}
    # Half of the rows are chosen and half of those get one id: 5,000, with a standard deviation of 61.
    assert abs((fills == 1).sum() - 5000) < 300


def test_evaluation_reads_every_row_once():
    stream = ChunkedStream(stream_of([[10 + i] * 9 + [END] for i in range(30)]), 2, 8, FILL)
    batches = [list(evaluation_batches(stream, 4, rank, 3)) for rank in range(3)]
    assert len({len(of_rank) for of_rank in batches}) == 1
    rows = [r for of_rank in batches for batch in of_rank for r in batch.rows]
    assert sorted(rows)[: len(stream)] == list(range(len(stream)))
    for batch in (batch for of_rank in batches for batch in of_rank):
        assert not batch.mask[batch.rows >= len(stream)].any()
    some = [b for rank in range(3) for b in evaluation_batches(stream, 4, rank, 3, most_rows=7)]
    assert sorted(r for b in some for r in b.rows[b.mask.any(1)]) == list(range(7))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: ChunkedStream(s, 4, 30, FILL), "30 is no multiple of 4; 32 would be"),
        (lambda s: ChunkedStream(s, 0, 30, FILL), "chunk_size must be at least 1"),
        (
            lambda s: Loader([ChunkedStream(s, 2, 8, FILL)], [1.0], 5, world_size=2),
            "multiple of the number of processes",
        ),
        (lambda s: Loader([ChunkedStream(s, 2, 8, FILL)] * 2, [1.0, 0.0001], 4), "at least a thousandth"),
        (
            lambda s: Loader([ChunkedStream(TokenStream([], []), 2, 8, FILL)], [1.0], 4),
            "no tokens in this split",
        ),
        (lambda s: next(evaluation_batches(ChunkedStream(TokenStream([], []), 2, 8, FILL), 4)), "no tokens"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(DataError, match=message):
        make(stream_of([[10, END]]))
