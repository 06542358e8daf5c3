from __future__ import annotations

import itertools

import numpy as np
import pytest

from data import order
from data.order import permuted, sample_ids

SIZES = [1, 2, 3, 7, 100_000, *(2**k + d for k in (2, 3, 4, 8, 11, 16) for d in (-1, 0, 1))]


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


def test_a_trillion_rows() -> None:
    n = 10**12
    rows = permuted(0, 0, n, np.arange(n - 200_000, n))
    assert len(np.unique(rows)) == 200_000
    assert rows.min() >= 0
    assert rows.max() < n
    assert rows.mean() == pytest.approx(n / 2, rel=0.01)


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
    centred = after / n - 0.5
    serial = float((centred[1:] * centred[:-1]).mean() * 12)
    if abs(serial) > 5 / np.sqrt(places):
        found.append(f"neighbours correlate: {serial:.3f}")
    thirds = np.bincount(after * 16 // n, minlength=16) - places / 16
    if (thirds**2).sum() / (places / 16) > 60:  # chi-squared, 15 degrees of freedom
        found.append("parts of the range come at different rates")
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
