from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from data.packing import Batch
from data.prefetch import Prefetched

WAIT = 10.0  # seconds until a test that hangs fails


class Feed:
    """Batches that hold their step, and a record of what was asked for, and in which thread."""

    def __init__(self, broken: int | None = None) -> None:
        self.made: list[int] = []
        self.threads: set[str] = set()
        self._broken = broken

    def train(self, step: int, rank: int, world: int) -> Batch:
        self.made.append(step)
        self.threads.add(threading.current_thread().name)
        if step == self._broken:
            raise RuntimeError(f"step {step}")
        return Batch(np.full((1, 1), step), np.full((1, 1), rank), np.full((1, 1), world))

    def settled(self, n: int) -> list[int]:
        """What was made once there are `n`, and a moment later: no more come."""
        deadline = time.monotonic() + WAIT
        while len(self.made) < n and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        return self.made


def test_gives_what_the_feed_gives_in_any_order() -> None:
    with Prefetched(Feed(), steps=20) as ahead:
        for step in [0, 1, 2, 3, 10, 11, 4, 4, 19, 0]:
            batch = ahead.train(step, 2, 3)
            assert (batch.tokens.item(), batch.targets.item(), batch.mask.item()) == (step, 2, 3)
        assert ahead.train(5, 0, 1).mask.item() == 1


def test_makes_the_next_ones_ahead_and_no_more() -> None:
    feed = Feed()
    with Prefetched(feed, steps=20, depth=3) as ahead:
        ahead.train(4, 0, 1)
        assert feed.settled(4) == [4, 5, 6, 7]
        ahead.train(5, 0, 1)
        assert feed.settled(5) == [4, 5, 6, 7, 8]
    assert len(feed.threads) == 1
    assert threading.current_thread().name not in feed.threads


def test_stops_at_the_last_step() -> None:
    feed = Feed()
    with Prefetched(feed, steps=6, depth=3) as ahead:
        ahead.train(4, 0, 1)
        ahead.train(5, 0, 1)
        assert feed.settled(2) == [4, 5]


def test_an_error_belongs_to_its_step() -> None:
    with Prefetched(Feed(broken=2), steps=9) as ahead:
        assert ahead.train(0, 0, 1).tokens.item() == 0
        assert ahead.train(1, 0, 1).tokens.item() == 1
        with pytest.raises(RuntimeError, match="step 2"):
            ahead.train(2, 0, 1)


def test_the_thread_finishes_each_batch_and_ends_with_the_block() -> None:
    def finish(batch: Batch) -> Batch:
        assert threading.current_thread().name.startswith("batches")
        return Batch(batch.tokens + 100, batch.targets, batch.mask)

    with Prefetched(Feed(), steps=9, finish=finish) as ahead:
        assert ahead.train(0, 0, 1).tokens.item() == 100
        assert ahead.train(1, 0, 1).tokens.item() == 101
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())
