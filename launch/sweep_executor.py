"""What makes the runs of a sweep, whether here or on a cluster: order, retries, signals."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from types import FrameType

from common.errors import EXIT_BAD_INPUT, Requeue
from launch.sweep_tasks import Result, SweepFolder, Task
from trainer.stop import heeded_signals


class Executor(ABC):
    """Makes tasks: in processes of this machine (`sweep_local.py`), or as jobs of a cluster (`sweep_slurm.py`)."""

    def __init__(self, folder: SweepFolder, parallel: int, retries: int) -> None:
        """`parallel` tasks at a time; one that fails is tried again so often."""
        self._folder, self._parallel, self._retries = folder, parallel, retries
        self._stopped_by: signal.Signals | None = None

    def run(self, tasks: list[Task], ended: Callable[[Result], None]) -> None:
        """Make all tasks, each after the one that it follows; tell of each once, when it ended for good.

        What follows a task that failed for good fails with it.

        Raises:
            Requeue: told to stop; what was begun is saved.
        """
        self._waiting, self._tried, self._ended = list(tasks), Counter[str](), ended
        self._done: set[str | None] = {None}
        before = {number: signal.signal(number, self._stop) for number in heeded_signals()}
        try:
            self._make()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._stopped_by is not None:
            raise Requeue(f"stopped by {self._stopped_by.name}; what was begun is saved, and the same command goes on")

    def _stop(self, number: int, _: FrameType | None) -> None:
        self._stopped_by = self._stopped_by or signal.Signals(number)

    @abstractmethod
    def _make(self) -> None:
        """Take tasks that are `_ready` off the list until it is empty, and `_settle` each; end early when stopped."""

    def _ready(self) -> list[Task]:
        return [task for task in self._waiting if task.after in self._done]

    def _settle(self, result: Result) -> None:
        """A task has ended, for good or to be tried again."""
        task = result.task
        self._tried[task.key] += 1
        hopeless = result.diverged or result.code == EXIT_BAD_INPUT or self._tried[task.key] > self._retries
        if result.code == 0:
            self._done.add(task.key)
            self._ended(result)
        elif self._stopped_by is not None:
            return
        elif hopeless:
            self._ended(result)
            self._fail_followers(task)
        else:
            self._folder.events.record("retry", run=task.key, reason=result.reason)
            self._waiting.append(task)

    def _fail_followers(self, failed: Task) -> None:
        for task in [task for task in self._waiting if task.after == failed.key]:
            self._waiting.remove(task)
            self._ended(Result(task, 1, f"{failed.key}, which it branches off, failed"))
            self._fail_followers(task)
