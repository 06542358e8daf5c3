"""Mixtures: which source each global sample comes from, by weight, as a function of the sample's number.

Weights become whole numbers of slots in a period of P samples, one period is scheduled, and the schedule repeats. So
after any number of samples, each source has had its share of them to within one sample. Taking at each sample the
source that is furthest behind does not do that from five sources on; Tijdeman's rule does (R. Tijdeman, "The chairman
assignment problem", Discrete Mathematics 32, 1980).
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

MAX_PERIOD = 65_536


@dataclass(frozen=True)
class Mixture:
    """The schedule of S sources: sample g is slot g mod P of period g div P."""

    counts: np.ndarray
    """int64 (S,): slots of each source in a period; they sum to P."""
    sources: np.ndarray
    """uint16 (P,): source of each slot."""
    ranks: np.ndarray
    """uint16 (P,): how many earlier slots of the period the slot's source has."""

    @classmethod
    def of(cls, weights: Sequence[float]) -> Mixture:
        """The schedule for weights, which need not sum to one.

        Raises:
            ValueError: a weight is not positive, or there are no sources, or more than 65,536.
        """
        return _of_slots(slots(weights))

    @property
    def period(self) -> int:
        """P."""
        return len(self.sources)

    @property
    def shares(self) -> np.ndarray:
        """float64 (S,): what share of the samples each source really gets."""
        return self.counts / self.period

    def samples(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of each of the samples start ... start + count - 1, and its number in that source: int64 (count,)."""
        periods, places = np.divmod(np.arange(start, start + count, dtype=np.int64), self.period)
        sources = self.sources[places].astype(np.int64)
        return sources, periods * self.counts[sources] + self.ranks[places]

    def taken(self, samples: int) -> np.ndarray:
        """int64 (S,): how many of the first `samples` samples are of each source."""
        periods, rest = divmod(samples, self.period)
        return periods * self.counts + np.bincount(self.sources[:rest], minlength=len(self.counts))


def slots(weights: Sequence[float]) -> tuple[int, ...]:
    """Slots of each source in a period of at most `MAX_PERIOD`.

    Weights are read as the decimals they are written as and divided by their sum. If a period of P slots, P at most
    65,536, has their exact ratios, the shortest such is taken. Otherwise P = 65,536, and weight w has floor(w P) slots;
    those that are left go to the largest remainders, one each. So a source of weight w gets its share to 1 / (w P) of
    itself. A source whose weight is less than 1 / P has one slot all the same, taken from the source that has most.
    """
    if not 1 <= len(weights) <= MAX_PERIOD or not all(w > 0 and math.isfinite(w) for w in weights):
        raise ValueError(f"weights must be positive, and 1 to {MAX_PERIOD:,} of them; got {list(weights)[:10]}")
    exact = [Fraction(str(w)) for w in weights]
    total = sum(exact)
    exact = [w / total for w in exact]
    period = math.lcm(*(w.denominator for w in exact))
    if period <= MAX_PERIOD:
        return tuple(int(w * period) for w in exact)
    period = MAX_PERIOD
    counts = [max(1, int(w * period)) for w in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: (counts[i] - exact[i] * period, i))
    for i in by_remainder[: max(0, period - sum(counts))]:
        counts[i] += 1
    for _ in range(sum(counts) - period):
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


@functools.lru_cache(maxsize=32)
def _of_slots(counts: tuple[int, ...]) -> Mixture:
    sources = schedule(counts)
    ranks = np.empty(len(sources), dtype=np.uint16)
    for source, count in enumerate(counts):
        ranks[sources == source] = np.arange(count)
    return Mixture(np.array(counts, dtype=np.int64), sources, ranks)


def schedule(counts: Sequence[int]) -> np.ndarray:
    """Source of each slot of one period, uint16 (P,), by Tijdeman's rule.

    With S sources and d = 2 S - 2, the unit number x (from 0) of a source with c slots of P is due in the slots t (from
    1) with x + 1 / d <= t c / P, and no later than the first t with t c / P > x + 1 - 1 / d. In each slot, of the units
    that are due, the one whose last slot comes first is taken. After t slots, |t c / P - taken| <= 1 - 1 / d for all.
    """
    period = sum(counts)
    d = max(1, 2 * len(counts) - 2)

    def due(source: int, x: int) -> tuple[int, int, int]:
        """First slot, source and unit."""
        return -(-(d * x + 1) * period // (d * counts[source])), source, x

    waiting = [due(source, 0) for source in range(len(counts))]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []  # last slot, source and unit
    result = np.empty(period, dtype=np.uint16)
    for t in range(1, period + 1):
        while waiting and waiting[0][0] <= t:
            _, source, x = heapq.heappop(waiting)
            last = (d * (x + 1) - 1) * period // (d * counts[source]) + 1
            heapq.heappush(ready, (last, source, x))
        _, source, x = heapq.heappop(ready)
        result[t - 1] = source
        if x + 1 < counts[source]:
            heapq.heappush(waiting, due(source, x + 1))
    return result
