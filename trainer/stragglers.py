"""Ranks that are slower than the others, from the time that each takes without waiting for them."""

from __future__ import annotations

import statistics

from trainer.events import EventLog

_SLOWER = 1.5  # times the median of the others
_SECONDS = 0.02  # and by so much: below, what counts is who writes the metrics
_STEPS = 50  # in a row
_SMOOTHING = 0.1


class OwnTimes:
    """Smoothed times of all ranks, and for how many steps each has been slow."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._slow_for: list[int] = []
        self._begun = False

    def add(self, seconds: list[float]) -> None:
        """The times of all ranks between two exchanges."""
        if len(seconds) < 2:
            return
        if not self._begun:  # what came before is set-up, which ranks do not share alike
            self._begun = True
            return
        if not self._seconds:
            self._seconds, self._slow_for = list(seconds), [0] * len(seconds)
        for rank, own in enumerate(seconds):
            self._seconds[rank] += _SMOOTHING * (own - self._seconds[rank])
        for rank, own in enumerate(self._seconds):
            slow = own > _SLOWER * self._others(rank) and own > self._others(rank) + _SECONDS
            self._slow_for[rank] = self._slow_for[rank] + 1 if slow else 0

    def told(self, events: EventLog, step: int) -> str:
        """Who has been slow for long, a line each, recorded as an event; once, until it was fast again."""
        lines = []
        for rank, steps in enumerate(self._slow_for):
            if steps >= _STEPS:
                own, others = self._seconds[rank], self._others(rank)
                events.record("straggler", step=step, rank=rank, seconds=round(own, 4), others=round(others, 4))
                lines.append(
                    f"rank {rank} is slow: it takes {own:.2f} s a step without waiting for the others, and these "
                    f"{others:.2f} s"
                )
                self._slow_for[rank] = -(10**12)
        return "\n".join(lines)

    def _others(self, rank: int) -> float:
        return statistics.median(own for other, own in enumerate(self._seconds) if other != rank)
