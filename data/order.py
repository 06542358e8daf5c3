"""The order of samples: a stateless pseudo-random permutation.

Which row comes at a place is computed from (seed, epoch, place) alone, so there is no shuffled list to hold, save or
agree on, and any place can be asked for at once, also of 10**12 rows.

The permutation is a Feistel network over the smallest even number of bits that holds n, walked until it lands under n
(at most 4 tries on average; more below 64 rows, where it costs nothing). Its round function must mix every input bit
into every output bit: with a bare multiply-and-mask, low bits never hear of high ones, and neighbours keep their parity
for a thousand places.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 4
_MIN_HALF_BITS = 4  # with narrower halves four rounds prefer some orders of a handful of rows to others
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def permuted(seed: int, epoch: int, n: int, indices: np.ndarray) -> np.ndarray:
    """Images of `indices` (any shape, each in [0, n)) under this seed's and epoch's permutation of range(n): int64."""
    places = np.asarray(indices)
    if places.size and (places.min() < 0 or places.max() >= n):
        raise IndexError(f"places {places.min()} ... {places.max()} of {n} rows")
    half = max(_MIN_HALF_BITS, (max(n - 1, 0).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    values = _feistel(places.astype(np.uint64).ravel(), keys, half)
    while (outside := np.flatnonzero(values >= n)).size:
        values[outside] = _feistel(values[outside], keys, half)
    return values.astype(np.int64).reshape(places.shape)


def sample_ids(seed: int, n: int, start: int, count: int) -> np.ndarray:
    """Rows of the global samples start ... start + count - 1: int64 (count,).

    Sample g is place g % n of epoch g // n, so each epoch holds every row once, in an order of its own.
    """
    if n < 1 or start < 0:
        raise ValueError(f"samples from {start} of {n} rows")
    samples = np.arange(start, start + count, dtype=np.int64)
    epochs, places = samples // n, samples % n
    ids = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        ids[epochs == epoch] = permuted(seed, int(epoch), n, places[epochs == epoch])
    return ids


def _feistel(values: np.ndarray, keys: list[np.uint64], half: int) -> np.ndarray:
    """A permutation of the numbers below 4**half; uint64 in and out."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_round(right, key) & mask)
    return (left << shift) | right


def _round(right: np.ndarray, key: np.uint64) -> np.ndarray:
    """splitmix64's finaliser on the half and the round's key."""
    x = right ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    """Round keys: each input is mixed in before the next, so that (seed, epoch) and (seed + 1, epoch - 1) differ."""
    state = _mix(_mix((seed + _GOLDEN) & _MASK64) ^ (epoch & _MASK64))
    return [np.uint64(_mix((state + i * _GOLDEN) & _MASK64)) for i in range(1, _ROUNDS + 1)]


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
