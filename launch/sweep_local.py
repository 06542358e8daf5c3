"""Making the runs of a sweep on this machine, several at a time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from common.errors import EXIT_BAD_INPUT, Requeue
from common.files import next_numbered
from launch import ROOT
from launch.sweep_tasks import Result, SweepFolder, Task, fail_followers, reason_of
from trainer.stop import heeded_signals


@dataclass
class _Worker:
    process: subprocess.Popen[str]
    log: Path
    task: Task | None = None


class LocalExecutor:
    """Worker processes, each with its share of threads, that are given one task after another."""

    words: tuple[str, ...] = ("-m", "launch.sweep_worker")  # of a worker

    def __init__(self, folder: SweepFolder, parallel: int, threads: int, retries: int) -> None:
        self._folder, self._parallel, self._threads, self._retries = folder, parallel, threads, retries
        self._workers: list[_Worker] = []
        self._stopped_by: signal.Signals | None = None

    def run(self, tasks: list[Task], ended: Callable[[Result], None]) -> None:
        """See `Executor`. A task that fails is tried again; what follows one that failed for good fails with it."""
        before = {number: signal.signal(number, self._stop) for number in heeded_signals()}
        try:
            self._run(tasks, ended)
        finally:
            for worker in self._workers:
                if worker.process.poll() is None:
                    worker.process.kill()
                worker.process.wait()
            self._workers.clear()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._stopped_by is not None:
            raise Requeue(f"stopped by {self._stopped_by.name}; what was begun is saved, and the same command goes on")

    def _stop(self, number: int, _: FrameType | None) -> None:
        """Pass the signal on to what trains; a second one ends everything, as it ends the workers."""
        self._stopped_by = self._stopped_by or signal.Signals(number)
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    def _run(self, tasks: list[Task], ended: Callable[[Result], None]) -> None:
        waiting, done, tried = list(tasks), set[str](), dict[str, int]()
        with selectors.DefaultSelector() as selector:
            while (waiting and self._stopped_by is None) or any(worker.task for worker in self._workers):
                if self._stopped_by is None:
                    self._give_out(waiting, done, selector)
                for key, _ in selector.select(timeout=1.0):
                    worker: _Worker = key.data
                    result = self._answer(worker, selector)
                    if result is None:
                        continue
                    task = result.task
                    tried[task.key] = tried.get(task.key, 0) + 1
                    hopeless = result.diverged or result.code == EXIT_BAD_INPUT or tried[task.key] > self._retries
                    if result.code == 0:
                        done.add(task.key)
                        ended(result)
                    elif self._stopped_by is not None:
                        continue
                    elif hopeless:
                        ended(result)
                        fail_followers(task, waiting, ended)
                    else:
                        self._folder.events.record("retry", run=task.key, reason=result.reason)
                        waiting.append(task)

    def _give_out(self, waiting: list[Task], done: set[str], selector: selectors.BaseSelector) -> None:
        """Give ready tasks, the longest first, to workers that wait, and start workers for them up to the limit."""
        ready = sorted((task for task in waiting if task.after in done | {None}), key=lambda task: -task.flops)
        for task in ready:
            idle = [worker for worker in self._workers if worker.task is None and worker.process.poll() is None]
            if not idle and len(self._workers) >= self._parallel:
                return
            worker = idle[0] if idle else self._start(selector)
            waiting.remove(task)
            worker.task = task
            self._folder.events.record("start", run=task.key, pid=os.getpid())
            assert worker.process.stdin is not None
            words = json.dumps({"config": str(task.base), "words": list(task.words)})
            with contextlib.suppress(BrokenPipeError):  # it has died; the selector tells
                print(words, file=worker.process.stdin, flush=True)

    def _start(self, selector: selectors.BaseSelector) -> _Worker:
        log = next_numbered(self._folder.path / "logs")
        log.mkdir(parents=True)
        log = log / "worker.log"
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        process = subprocess.Popen(
            [sys.executable, "-P", *self.words, str(log), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(self._threads)},
            start_new_session=True,  # a terminal's Ctrl-C comes from us alone, once
        )
        worker = _Worker(process, log)
        self._workers.append(worker)
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ, worker)
        return worker

    def _answer(self, worker: _Worker, selector: selectors.BaseSelector) -> Result | None:
        """What a worker has to say; one that ended is taken off the list."""
        assert worker.process.stdout is not None
        line, task = worker.process.stdout.readline(), worker.task
        code = json.loads(line)["code"] if line.endswith("\n") else None
        worker.task = None
        if code != 0:  # it ends, or has ended
            selector.unregister(worker.process.stdout)
            status = worker.process.wait()
            worker.process.stdout.close()
            self._workers.remove(worker)
            code = code or status or 1
        if task is None:
            return None
        if code == 0:
            return Result(task, 0)
        if code < 0:
            return Result(task, code, f"the process was ended by {signal.Signals(-code).name}; see {worker.log}")
        return Result(task, code, reason_of(task.run, worker.log))
