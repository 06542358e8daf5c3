"""Batches made ahead of time, in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from data.loader import Feed
from data.packing import Batch


class Prefetched:
    """A feed whose next batches are made in a thread while the one before is trained on.

    Any step may be asked for at any time; what was made ahead in vain is dropped. At most `depth` batches wait.
    """

    def __init__(self, feed: Feed, steps: int, depth: int = 2, finish: Callable[[Batch], Batch] | None = None) -> None:
        """`steps` is where the feed ends; `finish` is done to each batch in the thread."""
        self._feed, self._steps, self._depth, self._finish = feed, steps, depth, finish
        self._ahead: dict[tuple[int, int, int], Future[Batch]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")

    def train(self, step: int, rank: int, world: int) -> Batch:
        """The rows of `rank` in the global batch of `step` (zero-based). Raises what making them raises."""
        wanted = [(later, rank, world) for later in range(step + 1, min(step + 1 + self._depth, self._steps))]
        now = self._ahead.pop((step, rank, world), None) or self._thread.submit(self._make, step, rank, world)
        for key in self._ahead.keys() - set(wanted):
            self._ahead.pop(key).cancel()
        for key in wanted:
            if key not in self._ahead:
                self._ahead[key] = self._thread.submit(self._make, *key)
        return now.result()

    def _make(self, step: int, rank: int, world: int) -> Batch:
        batch = self._feed.train(step, rank, world)
        return batch if self._finish is None else self._finish(batch)

    def __enter__(self) -> Prefetched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
