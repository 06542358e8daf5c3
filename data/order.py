"""The order of samples: a stateless pseudo-random permutation.

Which row comes at a place is computed from (seed, epoch, place) alone, so there is no shuffled list to hold, save or
agree on, and any place can be asked for at once, also of 10**12 rows.

The permutation is a Feistel network over the smallest even number of bits that holds n, walked until it lands under n
(at most 4 tries on average; more below 64 rows, where it costs nothing). Its round function must mix every input bit
into every output bit: with a bare multiply-and-mask, low bits never hear of high ones, and neighbours keep their parity
for a thousand places.

A file system that is slow at single rows is better read in runs. `Shuffle` with a block does that in two levels: blocks
of consecutive rows are permuted, and then the rows of each window of blocks among one another. The order stays a
formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DEFAULT_WINDOW = 512

_ROUNDS = 4
_MIN_HALF_BITS = 4  # with narrower halves four rounds prefer some orders of a handful of rows to others
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# What the seed is mixed with for each use of a permutation, so that no two share one.
_BLOCKS, _SHORT_BLOCK, _WINDOWS = 1, 2, 3


@dataclass(frozen=True)
class Shuffle:
    """How an epoch is shuffled: all rows at once (no `block`), or blocks of rows, and rows within windows of blocks."""

    block: int | None = None  # rows in a block
    window: int = DEFAULT_WINDOW  # blocks in a window

    def permuted(self, seed: int, epoch: int, n: int, indices: np.ndarray) -> np.ndarray:
        """Images of `indices` (any shape, each in [0, n)) under this seed's and epoch's order of range(n): int64."""
        if self.block is None:
            return permuted(seed, epoch, n, indices)
        return _permuted_in_blocks(seed, epoch, n, indices, self.block, self.window)


ONE_LEVEL = Shuffle()


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


def sample_ids(seed: int, n: int, start: int, count: int, shuffle: Shuffle = ONE_LEVEL) -> np.ndarray:
    """Rows of the global samples start ... start + count - 1: int64 (count,).

    Sample g is place g % n of epoch g // n, so each epoch holds every row once, in an order of its own.
    """
    if n < 1 or start < 0:
        raise ValueError(f"samples from {start} of {n} rows")
    samples = np.arange(start, start + count, dtype=np.int64)
    epochs, places = samples // n, samples % n
    ids = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        ids[epochs == epoch] = shuffle.permuted(seed, int(epoch), n, places[epochs == epoch])
    return ids


def _permuted_in_blocks(seed: int, epoch: int, n: int, indices: np.ndarray, block: int, window: int) -> np.ndarray:
    """`permuted`, but the places of a window go to the rows of `window` blocks only.

    The rows are n // block whole blocks and a short last one of n % block rows, perhaps none. Whole blocks are
    permuted, and the short one is put in where a draw says: every order of blocks is as likely as any other, and where
    a window starts is known without a look at the blocks before it.
    """
    places = np.asarray(indices, dtype=np.int64)
    if places.size and (places.min() < 0 or places.max() >= n):
        raise IndexError(f"places {places.min()} ... {places.max()} of {n} rows")
    whole, short = divmod(n, block)
    # Which block of the epoch is the short one.
    short_at = int(_keys(_derived(seed, _SHORT_BLOCK), epoch)[0] % np.uint64(whole + 1))

    def start_of(number: np.ndarray) -> np.ndarray:
        """Place at which the block of this number in the epoch starts."""
        return number * block - (block - short) * (number > short_at)

    def block_of(place: np.ndarray) -> np.ndarray:
        """Number in the epoch of the block that holds a place."""
        return (place + (block - short) * (place >= short_at * block + short)) // block

    windows = block_of(places) // window
    rows = np.empty_like(places)
    for w in np.unique(windows):
        blocks = np.arange(w * window, min((w + 1) * window, whole + 1))
        images = np.full_like(blocks, whole)  # the short block is the file's last
        is_whole = blocks != short_at
        numbers = blocks[is_whole]
        images[is_whole] = permuted(_derived(seed, _BLOCKS), epoch, whole, numbers - (numbers > short_at))
        first, end = start_of(blocks[[0, -1]] + [0, 1])
        inside = windows == w
        key = _derived(_derived(seed, _WINDOWS), int(w))
        shuffled = first + permuted(key, epoch, int(end - first), places[inside] - first)
        numbers = block_of(shuffled)
        rows[inside] = images[numbers - blocks[0]] * block + shuffled - start_of(numbers)
    return rows


def _derived(seed: int, use: int) -> int:
    """Another seed for each use of one."""
    return _mix(_mix((seed + _GOLDEN) & _MASK64) ^ ((use * _GOLDEN) & _MASK64))


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
