"""Making the runs of a sweep as jobs of a SLURM cluster: an array of what can begin, then one of what follows it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from common.errors import EXIT_BAD_INPUT, Requeue
from common.files import atomic_write, next_numbered
from launch.finish import is_finished
from launch.slurm.cluster import ClusterConfig
from launch.slurm.control import SlurmError, slurm
from launch.slurm.job import CANCEL
from launch.slurm.script import Plan, render
from launch.slurm.snapshot import take_snapshot
from launch.slurm.submit import sbatch
from launch.sweep_tasks import Result, SweepFolder, Task, fail_followers, reason_of
from trainer.outcome import read_outcome
from trainer.stop import heeded_signals

_SECONDS = 2.0  # between looks at the queue


class SlurmExecutor:
    """A job for each task, on one node. Jobs that are preempted or lose their node come back by themselves."""

    def __init__(self, folder: SweepFolder, cluster: ClusterConfig, gpus: int, parallel: int, retries: int) -> None:
        self._folder, self._cluster, self._gpus = folder, cluster, gpus
        self._parallel, self._retries = parallel, retries
        self._stopped_by: signal.Signals | None = None

    def run(self, tasks: list[Task], ended: Callable[[Result], None]) -> None:
        """See `Executor`. A task that fails is tried again; what follows one that failed for good fails with it."""
        before = {number: signal.signal(number, self._stop) for number in heeded_signals()}
        try:
            self._run(tasks, ended)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._stopped_by is not None:
            raise Requeue(f"stopped by {self._stopped_by.name}; what was begun is saved, and the same command goes on")

    def _stop(self, number: int, _: FrameType | None) -> None:
        self._stopped_by = signal.Signals(number)

    def _run(self, tasks: list[Task], ended: Callable[[Result], None]) -> None:
        waiting, done, tried = list(tasks), set[str | None]([None]), Counter[str]()
        while waiting and self._stopped_by is None:
            for result in self._array([task for task in waiting if task.after in done]):
                task = result.task
                tried[task.key] += 1
                hopeless = result.diverged or result.code == EXIT_BAD_INPUT or tried[task.key] > self._retries
                if result.code == 0:
                    waiting.remove(task)
                    done.add(task.key)
                    ended(result)
                elif hopeless and self._stopped_by is None:
                    waiting.remove(task)
                    ended(result)
                    fail_followers(task, waiting, ended)
                elif self._stopped_by is None:
                    self._folder.events.record("retry", run=task.key, reason=result.reason)

    def _array(self, tasks: list[Task]) -> Iterator[Result]:
        """Submit tasks that need nothing more, and tell of each as it leaves the queue."""
        submission = next_numbered(self._folder.path.absolute() / "slurm")
        (submission / "code").mkdir(parents=True)
        take_snapshot(submission / "code")
        plan = Plan(
            name=f"sweep-{self._folder.path.name}",
            nodes=1,
            nproc=max(1, self._gpus),
            gpus=self._gpus,
            directory=Path.cwd(),
            submission=submission,
            run=self._folder.path.absolute(),
            words=[],
            elements={i: [str(task.base), *task.words] for i, task in enumerate(tasks)},
            array=f"0-{len(tasks) - 1}%{self._parallel}",
            runs={i: task.run.path.absolute() for i, task in enumerate(tasks)},
        )
        atomic_write(submission / "job.sh", render(plan, self._cluster))
        job = sbatch(submission / "job.sh")
        for task in tasks:
            self._folder.events.record("start", run=task.key, job=job)
        left, told = dict(enumerate(tasks)), False
        while left:
            queued = _queued(job)
            if queued is None:
                time.sleep(_SECONDS)
                continue
            for number in sorted(left.keys() - queued):
                yield _result(left.pop(number), submission / f"log-{job}_{number}.txt")
            if left and self._stopped_by is not None and not told:
                told = True
                self._cancel(job, submission, left)
            if left:
                time.sleep(_SECONDS)

    @staticmethod
    def _cancel(job: str, submission: Path, left: dict[int, Task]) -> None:
        """Let what runs save and end, and what waits not begin."""
        for number in left:
            (submission / f"{CANCEL}-{job}_{number}").touch()
        for words in (["--state=PENDING"], ["--signal=TERM"]):
            with contextlib.suppress(SlurmError):
                slurm("scancel", *words, job)


def _queued(job: str) -> set[int] | None:
    """Numbers of the elements that wait, run or are about to be requeued; None: SLURM does not answer now."""
    try:
        return {int(number) for number in slurm("squeue", "-h", "-r", "-j", job, "-o", "%K").split()}
    except SlurmError as error:
        return set() if "Invalid job id" in str(error) else None


def _result(task: Task, log: Path) -> Result:
    if task.cell is not None:
        whole = is_finished(task.cell.config, task.run)
    else:
        whole = int(task.key.rpartition("@")[2]) in task.run.committed()
    if whole:
        return Result(task, 0)
    outcome = read_outcome(task.run)
    return Result(task, outcome["exit_code"] or 1 if outcome is not None else 1, reason_of(task.run, log))
