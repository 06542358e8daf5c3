from __future__ import annotations

import itertools
import math
import time
import tracemalloc

import numpy as np
import pytest

from data import order
from data.order import Shuffle, permuted, sample_ids

PRIMES = [5, 251, 8191, 65_537, 99_991]
SIZES = [1, 2, 3, 7, 100_000, *PRIMES, *(2**k + d for k in (2, 3, 4, 8, 11, 16) for d in (-1, 0, 1))]
BLOCKS = [Shuffle(256, 512), Shuffle(100, 7), Shuffle(1, 5000), Shuffle(30_000, 1), Shuffle(10**6, 3)]


@pytest.mark.parametrize("n", SIZES)
def test_is_a_permutation(n: int) -> None:
    assert np.array_equal(np.sort(permuted(3, 5, n, np.arange(n))), np.arange(n))


def test_golden_values() -> None:
    """Runs that were begun must go on with the same order: these never change."""
    assert permuted(0, 0, 10, np.arange(10)).tolist() == [5, 4, 2, 6, 1, 7, 0, 9, 8, 3]
    assert permuted(1234, 7, 1_000_003, np.arange(5)).tolist() == [740832, 835587, 192624, 280985, 359724]
    assert permuted(-1, 2**40, 10**12, np.arange(4)).tolist() == [
        654358769836,
        952161281626,
        222546507533,
        650411707320,
    ]


def test_seeds_and_epochs_differ() -> None:
    orders = [permuted(seed, epoch, 1000, np.arange(1000)) for seed in range(5) for epoch in range(5)]
    agreements = [int((a == b).sum()) for a, b in itertools.combinations(orders, 2)]
    assert max(agreements) < 10  # one is expected; seed + 1, epoch - 1 is no way back to the same order
    assert np.mean(agreements) == pytest.approx(1.0, abs=0.3)


def test_a_single_place_needs_no_others() -> None:
    whole = permuted(1, 2, 12_345, np.arange(12_345))
    for place in (0, 1, 777, 12_344):
        assert permuted(1, 2, 12_345, np.array([place]))[0] == whole[place]
    assert permuted(1, 2, 12_345, np.array([[3, 4], [5, 6]])).tolist() == whole[3:7].reshape(2, 2).tolist()
    assert permuted(1, 2, 12_345, np.array([], dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("place", [-1, 10])
def test_places_outside_are_refused(place: int) -> None:
    with pytest.raises(IndexError):
        permuted(0, 0, 10, np.array([place]))


@pytest.mark.parametrize("shuffle", [Shuffle(), Shuffle(256, 512)], ids=["one level", "blocks"])
@pytest.mark.parametrize("first", [0, 123_456_789_012, 10**12 - 200_000])
def test_a_trillion_rows(shuffle: Shuffle, first: int) -> None:
    """Different places have different rows, in memory for the places and none for the rest."""
    n = 10**12
    tracemalloc.start()
    rows = sample_ids(0, n, first, 200_000, shuffle)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    assert len(np.unique(rows)) == 200_000
    assert rows.min() >= 0
    assert rows.max() < n
    # Of 200,000 rows; of the blocks that these come from, if there are any.
    n_draws = 200_000 if shuffle.block is None else 200_000 / shuffle.block
    assert abs(rows.mean() / n - 0.5) < 4 / math.sqrt(12 * n_draws)


def test_every_order_of_three_rows_is_as_likely() -> None:
    counts = np.zeros(27)
    for epoch in range(1200):
        counts[permuted(0, epoch, 3, np.arange(3)) @ np.array([9, 3, 1])] += 1
    counts = counts[counts > 0]
    assert len(counts) == 6
    assert ((counts - 200) ** 2 / 200).sum() < 25  # chi-squared, 5 degrees of freedom: p = 1e-4


def faults(n: int, places: int) -> list[str]:
    """What betrays that the images of places 0, 1, 2, ... are not random: five standard deviations or more."""
    before = np.arange(places)
    after = permuted(0, 0, n, before)
    found = []
    flips = float((np.diff(after & 1) != 0).mean())
    if abs(flips - 0.5) > 2.5 / np.sqrt(places):
        found.append(f"neighbours change parity with frequency {flips:.4f}")
    signs = [1 - 2 * (before >> bit & 1) for bit in range(int(places).bit_length() - 1)]
    parity = 1 - 2 * (after & 1)
    pairs = [a * b for a, b in itertools.combinations(signs, 2)]
    worst = max(abs(float((parity * sign).mean())) for sign in signs + pairs)
    if worst > 5 / np.sqrt(places):
        found.append(f"parity follows bits of the place: correlation {worst:.3f}")
    for what, values in (("rows", after), ("low bits", after % 4)):
        centred = (values - values.mean()) / values.std()
        serial = float((centred[1:] * centred[:-1]).mean())
        if abs(serial) > 5 / np.sqrt(places):
            found.append(f"{what} of neighbours correlate: {serial:.3f}")
    thirds = np.bincount(after * 16 // n, minlength=16) - places / 16
    if (thirds**2).sum() / (places / 16) > 60:  # chi-squared, 15 degrees of freedom
        found.append("parts of the range come at different rates")
    batches = (after[: places // 512 * 512].reshape(-1, 512) * 16 // n)[..., None] == np.arange(16)
    chi = float(((batches.sum(axis=1) - 32) ** 2 / 32).sum(axis=1).mean())
    if abs(chi - 15) > 5 * np.sqrt(30 / len(batches)):  # of batches of 512: neither too uneven nor too even
        found.append(f"batches are spread over the range with a mean chi-squared of {chi:.1f}, not 15")
    return found


@pytest.mark.parametrize("n", [2**20, 1_000_003, 5_000_000])
def test_order_looks_random(n: int) -> None:
    assert faults(n, 2**16) == []


@pytest.mark.parametrize("n", [2**20, 1_000_003])
def test_the_tests_above_catch_a_weak_round_function(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A multiplication under a mask carries bits only upwards, so the lowest never learn of the others."""
    monkeypatch.setattr(order, "_round", lambda right, key: right * np.uint64(2_654_435_761) + key)
    assert np.array_equal(np.sort(permuted(0, 0, 1000, np.arange(1000))), np.arange(1000))
    found = faults(n, 2**16)
    assert any("parity with frequency" in fault for fault in found)
    assert any("parity follows" in fault for fault in found)
    assert any("low bits of neighbours correlate" in fault for fault in found)
    assert any("rows of neighbours correlate" in fault for fault in found) == (n == 2**20)
    assert any("chi-squared" in fault for fault in found)


def test_samples_go_through_every_row_once_an_epoch() -> None:
    ids = sample_ids(seed=4, n=10, start=0, count=30)
    epochs = ids.reshape(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert sample_ids(4, 10, 7, 16).tolist() == ids[7:23].tolist()
    assert sample_ids(4, 10, 7, 0).tolist() == []


def test_one_row_is_every_sample() -> None:
    assert sample_ids(0, 1, 5, 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("n", "start"), [(0, 0), (5, -1)])
def test_senseless_samples_are_refused(n: int, start: int) -> None:
    with pytest.raises(ValueError, match="rows"):
        sample_ids(0, n, start, 1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("shuffle", BLOCKS, ids=str)
def test_two_levels_are_a_permutation(shuffle: Shuffle, n: int) -> None:
    """Also where the last block is short, and the last window."""
    ids = sample_ids(3, n, n, n, shuffle)
    assert np.array_equal(np.sort(ids), np.arange(n))


def test_two_levels_small_blocks_exhaustively() -> None:
    for n, block, window in itertools.product((1, 2, 5, 12, 13, 64, 90), (1, 2, 5, 13), (2, 3, 50)):
        for epoch in range(3):
            ids = Shuffle(block, window).permuted(7, epoch, n, np.arange(n))
            assert sorted(ids.tolist()) == list(range(n)), (n, block, window)


def test_two_levels_read_the_rows_of_few_blocks_at_a_time() -> None:
    n, block, window = 100_003, 64, 20
    ids = Shuffle(block, window).permuted(1, 0, n, np.arange(n))
    short = np.flatnonzero(ids >= n // block * block)  # rows of the last, short block: windows after it start earlier
    start = 0
    while start < n:
        size = block * window if not ((short >= start) & (short < start + block * window)).any() else None
        size = size or block * (window - 1) + n % block
        blocks = np.unique(ids[start : start + size] // block)
        assert len(blocks) == window or start + size > n
        # Each of these blocks is whole in the window: read once an epoch.
        assert np.isin(ids // block, blocks).sum() == len(ids[start : start + size])
        assert not np.array_equal(np.diff(blocks), np.ones(len(blocks) - 1))  # they are blocks from anywhere
        start += size


def test_two_levels_shuffle_blocks_and_rows() -> None:
    """Epochs and seeds have orders of their own, and a window's rows do not come block by block."""
    n, shuffle = 50_000, Shuffle(50, 20)
    orders = [shuffle.permuted(seed, epoch, n, np.arange(n)) for seed in range(3) for epoch in range(3)]
    for a, b in itertools.combinations(orders, 2):
        assert (a == b).sum() < 20  # two or so are expected
    for order_ in orders:
        same_block = (order_[1:] // 50 == order_[:-1] // 50).mean()
        assert same_block == pytest.approx(1 / 20, abs=0.01)
        assert abs(np.corrcoef(np.arange(n), order_)[0, 1]) < 5 / math.sqrt(n / 50)
    # Which block is the short one, and so where it comes, is drawn too.
    epochs = [Shuffle(50, 2).permuted(0, epoch, 1049, np.arange(1049)) for epoch in range(200)]
    numbers = [int(np.flatnonzero(epoch >= 1000)[0]) // 100 for epoch in epochs]
    assert set(numbers) == set(range(11))
    assert max(np.bincount(numbers)) < 40  # of 19 expected, and 10 for the last window, which is half as long


def test_two_levels_need_no_other_places() -> None:
    whole = Shuffle(16, 9).permuted(1, 2, 12_345, np.arange(12_345))
    assert np.array_equal(Shuffle(16, 9).permuted(1, 2, 12_345, np.arange(5000, 5050)), whole[5000:5050])
    assert Shuffle(16, 9).permuted(1, 2, 12_345, np.array([[3, 4], [5, 12_344]])).shape == (2, 2)
    for place in (-1, 12_345):
        with pytest.raises(IndexError):
            Shuffle(16, 9).permuted(1, 2, 12_345, np.array([place]))


def test_golden_values_of_two_levels() -> None:
    assert Shuffle(4, 3).permuted(0, 0, 30, np.arange(12)).tolist() == [15, 5, 7, 13, 14, 4, 1, 2, 0, 6, 12, 3]
    assert Shuffle(256, 512).permuted(1234, 7, 10**12, np.arange(3)).tolist() == [
        31164270963,
        297456048829,
        278479583830,
    ]


@pytest.mark.verify
@pytest.mark.parametrize("shuffle", [Shuffle(), Shuffle(256, 512)], ids=["one level", "blocks"])
def test_a_million_indices_take_less_than_a_second(shuffle: Shuffle) -> None:
    times = []
    for repeat in range(5):
        begin = time.perf_counter()
        sample_ids(0, 10**12, repeat * 10**7, 10**6, shuffle)
        times.append(time.perf_counter() - begin)
    assert sorted(times)[2] < 1.0
