"""Rows and batches, compared with simple reference implementations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm.data.chunks import ChunkedStream
from calm.data.loader import PERIOD, Loader, evaluation_batches
from calm.data.shards import TokenStream
from calm.errors import DataError
from calm.seeds import permute

PAD, EOS = 2, 1


def stream_of(documents: list[list[int]], per_part: int = 3) -> TokenStream:
    """A stream of documents, `per_part` per shard."""
    parts, lengths = [], []
    for start in range(0, len(documents), per_part):
        members = documents[start : start + per_part]
        parts.append(np.concatenate([np.array(d, dtype=np.uint16) for d in members]))
        lengths.append(np.array([len(d) for d in members], dtype=np.uint32))
    return TokenStream(parts, lengths)


document_lists = st.lists(
    st.lists(st.integers(10, 99), max_size=12).map(lambda ids: [*ids, EOS]), min_size=1, max_size=12
)


@given(document_lists, st.data())
def test_stream_indexing_matches_one_array(documents, data):
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
    """Over 2,000 keys, all pairs of five positions and values are equally frequent: chi-square with 16 degrees."""
    counts = np.zeros((5, 5))
    keys = np.repeat(np.arange(2000), 5)
    np.add.at(counts, (np.tile(np.arange(5), 2000), permute(np.tile(np.arange(5), 2000), 5, keys)), 1)
    assert ((counts - 400) ** 2 / 400).sum() < 45  # the 99.99% quantile is 44.9
    big = permute(np.arange(100_000), 100_000, 7)
    assert abs(np.corrcoef(np.arange(100_000), big)[0, 1]) < 0.02


@given(document_lists, st.integers(1, 5), st.integers(1, 4), st.data())
def test_packed_rows(documents, chunk_size, chunks, data):
    flat = sum(documents, [])
    rows = ChunkedStream(stream_of(documents), chunk_size, chunks * chunk_size, PAD)
    for index in range(len(rows)):
        padding = data.draw(st.integers(0, chunk_size - 1))
        tokens, mask = rows.row(index, padding)
        start = index * chunks * chunk_size
        expected = flat[start : start + rows.row_length - padding]
        assert tokens[mask].tolist() == expected
        assert (tokens[:padding] == PAD).all()
        assert not mask[:padding].any()
        trailing = len(mask) - padding - len(expected)
        assert mask.tolist() == [False] * padding + [True] * len(expected) + [False] * trailing
    assert start + rows.row_length >= len(flat)  # the rows cover the whole stream


@given(document_lists, st.integers(1, 5), st.integers(1, 4))
def test_aligned_rows(documents, chunk_size, chunks):
    """Reference: documents padded to a multiple of the chunk size, concatenated and sliced."""
    padded = [d + [PAD] * (-len(d) % chunk_size) for d in documents]
    flat, valid = sum(padded, []), sum(([1] * len(d) + [0] * (-len(d) % chunk_size) for d in documents), [])
    rows = ChunkedStream(stream_of(documents), chunk_size, chunks * chunk_size, PAD, align_documents=True)
    for index in range(len(rows)):
        start = index * chunks * chunk_size
        tokens, mask = rows.row(index)
        length = len(flat[start : start + rows.row_length])
        assert tokens[:length].tolist() == flat[start : start + rows.row_length]
        assert mask[:length].tolist() == [bool(m) for m in valid[start : start + rows.row_length]]
        assert not mask[length:].any()
    assert start + rows.row_length >= len(flat)


@given(document_lists, st.integers(2, 5), st.data())
def test_aligned_rows_with_front_padding_keep_chunk_boundaries(documents, chunk_size, data):
    rows = ChunkedStream(stream_of(documents), chunk_size, 3 * chunk_size, PAD, align_documents=True)
    index = data.draw(st.integers(0, len(rows) - 1))
    padding = data.draw(st.integers(0, chunk_size - 1))
    tokens, mask = rows.row(index, padding)
    assert not mask[:padding].any()
    ends = np.flatnonzero(tokens == EOS)
    for end in ends:  # the rest of a document's last chunk is padding
        boundary = -(-(end + 1) // chunk_size) * chunk_size
        assert not mask[end + 1 : boundary].any()
    start, position = index * 3 * chunk_size, 0
    for document in documents:  # the first document follows the front padding
        if position <= start < position + len(document) + (-len(document) % chunk_size):
            rest = document[start - position :]
            assert tokens[padding : padding + len(rest)].tolist() == rest[: len(tokens) - padding]
        position += len(document) + (-len(document) % chunk_size)


def loaders(documents, world_size, weights=(1.0,), seed=3, **kwargs):
    streams = [ChunkedStream(stream_of(documents), 2, 8, PAD) for _ in weights]
    return [
        Loader(streams, list(weights), 12, seed, rank=r, world_size=world_size, **kwargs) for r in range(world_size)
    ]


@given(document_lists, st.integers(0, 2**30), st.sampled_from([(1.0,), (3.0, 1.0)]))
def test_global_batch_does_not_depend_on_world_size(documents, step, weights):
    (single,) = loaders(documents, 1, weights)
    expected = single.batch(step)
    assert np.array_equal(loaders(documents, 3, weights)[1].batch_and_whole(step)[1].tokens, expected.tokens)
    for world_size in (2, 3, 4):
        parts = [loader.batch(step) for loader in loaders(documents, world_size, weights)]
        for field in range(3):
            assert np.array_equal(np.concatenate([part[field] for part in parts]), expected[field])


@given(document_lists, st.integers(0, 6))
def test_resume_at_any_step(documents, step):
    """A new loader that starts at a step returns the same batch as one that has read all earlier steps."""
    (old,), (new,) = loaders(documents, 1), loaders(documents, 1)
    for before in range(step):
        old.batch(before)
    for expected, actual in zip(old.batch(step), new.batch(step), strict=True):
        assert np.array_equal(actual, expected)


def test_every_epoch_has_all_rows_in_a_different_order():
    documents = [[10 + i, *range(100, 130), EOS] for i in range(60)]
    stream = ChunkedStream(stream_of(documents), 2, 8, PAD)
    loader = Loader([stream], [1.0], 1, seed=5, front_padding=0)
    epochs = [[loader.batch(e * len(stream) + i).tokens[0].tobytes() for i in range(len(stream))] for e in range(2)]
    rows = sorted(stream.row(i).tokens.tobytes() for i in range(len(stream)))
    assert sorted(epochs[0]) == sorted(epochs[1]) == rows
    assert epochs[0] != epochs[1]


def test_mixture_has_exact_weights_and_uses_every_row():
    first, second = [[10] * 7 + [EOS]] * 40, [[50] * 7 + [EOS]] * 40
    streams = [ChunkedStream(stream_of(d), 2, 8, PAD) for d in (first, second)]
    loader = Loader(streams, [0.7, 0.3], PERIOD // 4, front_padding=0)
    from_first = sum((loader.batch(step).tokens[:, 0] < 50).sum() for step in range(4))
    assert from_first == 700
    datasets, positions = loader._positions(np.arange(3 * PERIOD))
    assert sorted(positions[datasets == 1]) == list(range(900))  # no row of the dataset is skipped


def test_front_padding_is_uniform_and_has_the_configured_fraction():
    (loader,) = loaders([[10] * 50 + [EOS]], 1, front_padding=0.5)
    rows = np.arange(20_000)
    lengths = loader._front_padding(rows)
    assert set(lengths) == {0, 1}
    # Half of the rows are selected, and half of those get one token: 5,000, with a standard deviation of 61.
    assert abs((lengths == 1).sum() - 5000) < 300


def test_evaluation_batches_contain_every_row_once():
    stream = ChunkedStream(stream_of([[10 + i] * 9 + [EOS] for i in range(30)]), 2, 8, PAD)
    batches = [list(evaluation_batches(stream, 4, rank, 3)) for rank in range(3)]
    assert len({len(rank_batches) for rank_batches in batches}) == 1
    rows = [r for rank_batches in batches for batch in rank_batches for r in batch.rows]
    assert sorted(rows)[: len(stream)] == list(range(len(stream)))
    for batch in (batch for rank_batches in batches for batch in rank_batches):
        assert not batch.mask[batch.rows >= len(stream)].any()
    some = [b for rank in range(3) for b in evaluation_batches(stream, 4, rank, 3, max_rows=7)]
    assert sorted(r for b in some for r in b.rows[b.mask.any(1)]) == list(range(7))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: ChunkedStream(s, 4, 30, PAD), "30 is not a multiple of 4; use 32"),
        (lambda s: ChunkedStream(s, 0, 30, PAD), "chunk_size must be at least 1"),
        (
            lambda s: Loader([ChunkedStream(s, 2, 8, PAD)], [1.0], 5, world_size=2),
            "multiple of the number of processes",
        ),
        (lambda s: Loader([ChunkedStream(s, 2, 8, PAD)] * 2, [1.0, 0.0001], 4), "at least 1/1000 of the total weight"),
        (
            lambda s: Loader([ChunkedStream(TokenStream([], []), 2, 8, PAD)], [1.0], 4),
            "no tokens in this split",
        ),
        (lambda s: next(evaluation_batches(ChunkedStream(TokenStream([], []), 2, 8, PAD), 4)), "no tokens"),
    ],
)
def test_invalid_arguments(make, message):
    with pytest.raises(DataError, match=message):
        make(stream_of([[10, EOS]]))
