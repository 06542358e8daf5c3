"""Making the runs of a sweep as jobs of a SLURM cluster: an array of what can begin, then one of what follows it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from common.files import atomic_write, next_numbered
from launch.finish import is_finished
from launch.slurm.cluster import ClusterConfig
from launch.slurm.control import SlurmError, slurm
from launch.slurm.job import CANCEL
from launch.slurm.script import Plan, render
from launch.slurm.snapshot import take_snapshot
from launch.slurm.submit import sbatch
from launch.sweep_executor import Executor
from launch.sweep_tasks import Result, SweepFolder, Task, reason_of
from trainer.outcome import read_outcome

_SECONDS = 2.0  # between looks at the queue


class SlurmExecutor(Executor):
    """A job for each task, on one node. Jobs that are preempted or lose their node come back by themselves."""

    def __init__(self, folder: SweepFolder, cluster: ClusterConfig, gpus: int, parallel: int, retries: int) -> None:
        super().__init__(folder, parallel, retries)
        self._cluster, self._gpus = cluster, gpus

    def _make(self) -> None:
        while self._waiting and self._stopped_by is None:
            tasks = self._ready()
            self._waiting = [task for task in self._waiting if task not in tasks]
            for result in self._array(tasks):
                self._settle(result)

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
