"""Seeds: everything random follows from the seed of a run, the stream that uses it, and a row or step number.

So the same seed gives the same numbers on every machine, for every number of processes, and after every restart.
"""

from enum import IntEnum

import numpy as np


class SeedStream(IntEnum):
    """What a seed is used for. Two uses of one seed never share random numbers."""

    ORDER = 0  # in which order training reads the rows of a data set
    MIXTURE = 1  # from which data set a row comes
    FRONT_PADDING = 2  # whether a row starts with padding
    FRONT_PADDING_LENGTH = 3
    TRAINING = 4  # noise, dropout and samples of a training row
    VOCABULARY = 5  # random tokens of a sampled softmax
    LIBRARIES = 6  # torch's global generator in a training step
    EVALUATION = 7  # samples of BrierLM
    GENERATION = 8  # samples of a generated text
    LIKELIHOOD = 9  # latents of a likelihood bound
    TRADEOFF = 10  # samples of the accuracy-diversity curve
    TEACHER = 11  # samples of the teacher in a training row


def hash64(*values: int | np.ndarray) -> np.ndarray:
    """A 64-bit hash of some integers (splitmix64, once for each): the same on every machine and in every version."""
    state = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            state = (state ^ np.asarray(value).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def row_seeds(rows: np.ndarray, *key: int) -> list[int]:
    """A seed for the randomness of each row, as torch takes it: 63 bits."""
    return [int(seed) for seed in hash64(*key, rows) >> 1]


def permute(index: np.ndarray, size: int, *key: int | np.ndarray) -> np.ndarray:
    """Where a seeded permutation of range(size) sends `index`, without holding the permutation.

    A Feistel network permutes the next power of four; walking on from results beyond `size` restricts it.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)

    def network(value: np.ndarray, *key: int | np.ndarray) -> np.ndarray:
        left, right = value >> half, value & low
        for number in range(6):
            left, right = right, left ^ (hash64(*key, number, right) & low)
        return (left << half) | right

    result, *keys = np.broadcast_arrays(np.asarray(index, dtype=np.uint64), *key)
    result = network(result, *keys)
    while (outside := result >= size).any():
        result[outside] = network(result[outside], *(k[outside] for k in keys))
    return result.astype(np.int64)


def torch_seed(*key: int) -> int:
    """A seed as torch takes it: 63 bits."""
    return int(hash64(*key) >> 1)
