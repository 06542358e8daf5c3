from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest

from data.mixture import MAX_PERIOD, Mixture, schedule, slots

Scheduler = Callable[[Sequence[int]], np.ndarray]


def worst_error(counts: Sequence[int], scheduler: Scheduler = schedule) -> Fraction:
    """Largest |share x samples - samples had| over all prefixes of a period and all sources, exactly."""
    period = sum(counts)
    sources = scheduler(counts).astype(np.int64)
    had = np.cumsum(sources[:, None] == np.arange(len(counts)), axis=0)
    assert had[-1].tolist() == list(counts)
    t = np.arange(1, period + 1)[:, None]
    return Fraction(int(np.abs(t * np.array(counts) - period * had).max()), period)


def greedy(counts: Sequence[int]) -> np.ndarray:
    """Always the source that is furthest behind: the rule that is not enough."""
    period, had, result = sum(counts), [0] * len(counts), []
    for t in range(1, period + 1):
        source = max(range(len(counts)), key=lambda i: counts[i] * t - period * had[i])
        had[source] += 1
        result.append(source)
    return np.array(result)


def counts_of(generator: random.Random) -> list[int]:
    return [generator.randint(1, generator.choice((3, 30, 300))) for _ in range(generator.randint(2, 12))]


@pytest.mark.parametrize("seed", range(150))
def test_every_prefix_is_within_tijdemans_bound(seed: int) -> None:
    counts = counts_of(random.Random(seed))
    assert worst_error(counts) <= 1 - Fraction(1, 2 * len(counts) - 2)


COUNTEREXAMPLE = [1, 1, 1, 11, 11]  # the smallest there is


def test_the_furthest_behind_first_is_not_enough_from_five_sources_on() -> None:
    assert worst_error(COUNTEREXAMPLE, greedy) > 1
    assert worst_error(COUNTEREXAMPLE) <= Fraction(7, 8)


@pytest.mark.parametrize(
    "counts", [[1], [65_536], [1, 65_535], [1] * 40, [65_531, 1, 1, 1, 1, 1], [13_107, 13_107, 13_107, 13_107, 13_108]]
)
def test_extreme_periods(counts: list[int]) -> None:
    assert worst_error(counts) <= (1 - Fraction(1, 2 * len(counts) - 2) if len(counts) > 1 else 0)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1], (1,)),
        ([0.7, 0.3], (7, 3)),
        ([7, 3], (7, 3)),
        ([0.1, 0.2, 0.7], (1, 2, 7)),
        ([1e-3, 1], (1, 1000)),
        ([0.5, 0.25, 0.25], (2, 1, 1)),
        ([2.5, 2.5], (1, 1)),
        ([0.33, 0.33, 0.34], (33, 33, 34)),
        ([1e-5, 1.0], (1, 65_535)),  # less than a slot
        ([1 / 3, 2 / 3], (1, 2)),
        ([0.333333, 0.666667], (21_845, 43_691)),  # a million slots would be exact, and too many
    ],
)
def test_slots(weights: list[float], expected: tuple[int, ...]) -> None:
    assert slots(weights) == expected


@pytest.mark.parametrize("seed", range(100))
def test_slots_are_off_by_less_than_one_each(seed: int) -> None:
    """So the relative error of weight w is under 1 / (w P), and a weight below 1 / P has its one slot."""
    generator = random.Random(seed)
    weights = [10 ** generator.uniform(-4, 0) for _ in range(generator.randint(2, 20))]
    counts = slots(weights)
    period = sum(counts)
    assert period == MAX_PERIOD
    for weight, count in zip(weights, counts, strict=True):
        exact = weight / sum(weights) * period
        assert count >= 1
        assert count == 1 if exact < 1 else abs(count - exact) < 1


def test_tiny_weights_take_their_slot_from_the_largest() -> None:
    weights = [1.0, 0.4, *[1e-9] * 50]
    counts = slots(weights)
    assert counts[2:] == (1,) * 50
    assert counts[1] == int(0.4 / sum(weights) * MAX_PERIOD)
    assert counts[0] == MAX_PERIOD - 50 - counts[1]


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_senseless_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be positive"):
        slots(weights)


def test_a_thousand_sources() -> None:
    mixture = Mixture.of([1.0 + i for i in range(1000)])
    assert mixture.period <= MAX_PERIOD
    assert np.bincount(mixture.sources).min() >= 1


@pytest.mark.parametrize("weights", [[1.0], [0.7, 0.3], [0.5, 0.2, 0.2, 0.05, 0.05], [1 / 3, 2 / 3, 0.1]])
def test_numbers_count_each_source_from_zero_over_periods(weights: list[float]) -> None:
    mixture = Mixture.of(weights)
    total = 3 * mixture.period + 170 if mixture.period < 1000 else mixture.period + 2000
    sources, numbers = mixture.samples(0, total)
    for source in range(len(weights)):
        assert np.array_equal(numbers[sources == source], np.arange((sources == source).sum()))
    assert np.array_equal(mixture.taken(total), np.bincount(sources, minlength=len(weights)))
    assert mixture.shares == pytest.approx(np.array(weights) / sum(weights), rel=1e-3)
    # Any part alone is the same.
    start = total // 2
    part, its = mixture.samples(start, 50)
    assert np.array_equal(part, sources[start : start + 50])
    assert np.array_equal(its, numbers[start : start + 50])
    assert (mixture.taken(start) == np.bincount(sources[:start], minlength=len(weights))).all()


def test_far_away_samples_are_known_at_once() -> None:
    mixture = Mixture.of([0.6, 0.3, 0.1])
    assert mixture.period == 10
    sources, numbers = mixture.samples(10**15, 10)
    assert np.array_equal(sources, mixture.sources)
    assert np.array_equal(numbers, mixture.counts[sources] * 10**14 + mixture.ranks)
    assert mixture.taken(10**15).tolist() == [6 * 10**14, 3 * 10**14, 10**14]


def test_golden_schedules() -> None:
    """Runs that were begun must go on with the same mixture: these never change."""
    assert schedule([7, 3]).tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert schedule([5, 2, 1]).tolist() == [0, 0, 1, 0, 2, 0, 0, 1]
    assert "".join(map(str, schedule(COUNTEREXAMPLE))) == "3434340343434341343423434"
