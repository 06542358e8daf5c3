"""Making the runs of a sweep on this machine, several at a time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from common.files import next_numbered
from launch import python_path
from launch.sweep_executor import Executor
from launch.sweep_tasks import Result, SweepFolder, Task, reason_of


@dataclass
class _Worker:
    process: subprocess.Popen[str]
    log: Path
    task: Task | None = None


class LocalExecutor(Executor):
    """Worker processes, each with its share of threads, that are given one task after another."""

    words: tuple[str, ...] = ("-m", "launch.sweep_worker")  # of a worker

    def __init__(self, folder: SweepFolder, parallel: int, threads: int, retries: int) -> None:
        super().__init__(folder, parallel, retries)
        self._threads = threads
        self._workers: list[_Worker] = []

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Pass the signal on to what trains; a second one ends everything, as it ends the workers."""
        super()._stop(number, frame)
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    def _make(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                while (self._waiting and self._stopped_by is None) or any(worker.task for worker in self._workers):
                    if self._stopped_by is None:
                        self._give_out(selector)
                    for key, _ in selector.select(timeout=1.0):
                        if (result := self._answer(key.data, selector)) is not None:
                            self._settle(result)
        finally:
            for worker in self._workers:
                if worker.process.poll() is None:
                    worker.process.kill()
                worker.process.wait()
            self._workers.clear()

    def _give_out(self, selector: selectors.BaseSelector) -> None:
        """Give ready tasks, the longest first, to workers that wait, and start workers for them up to the limit."""
        for task in sorted(self._ready(), key=lambda task: -task.flops):
            idle = [worker for worker in self._workers if worker.task is None and worker.process.poll() is None]
            if not idle and len(self._workers) >= self._parallel:
                return
            worker = idle[0] if idle else self._start(selector)
            self._waiting.remove(task)
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
        process = subprocess.Popen(
            [sys.executable, "-P", *self.words, str(log), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": str(self._threads)},
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
