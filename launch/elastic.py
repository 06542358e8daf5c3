"""torch elastic's agent, with what it lacks: it passes a signal on once and waits for the save, lets workers end by
themselves, and restarts them only where that may help."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from common.errors import EXITS_THAT_EXPLAIN
from common.nodes import Nodes
from launch.meeting import Meeting
from trainer.stop import Repeats, heeded_signals

# For what the other workers do when one has ended: reports, stacks, a checkpoint that needs only its last file.
_SECONDS_AFTER_A_DEATH = 10.0
_FOLLOWS = "ended with the others"


class Ended(NamedTuple):
    """How a gang of workers ended, for want of success."""

    rank: int  # that ended first
    how: str  # the signal, hang, or exit code
    message: str  # to tell
    exit_code: int  # of the command
    retry: bool  # whether another attempt may do better
    time: float = 0.0
    node: int = 0  # the machine, and its name
    host: str = ""


# Told the number of the attempt, the failures, and the signal by which workers were cut off, if they were.
Judge = Callable[[int, Mapping[int, ProcessFailure], signal.Signals | None], Ended]


class Agent(LocalElasticAgent):
    """Starts workers, and starts them anew for as long as `judge` says so and `max_restarts` lets it."""

    def __init__(
        self,
        words: list[str],
        nproc: int,
        nodes: Nodes,
        logs: Path,
        max_restarts: int,
        judge: Judge,
        restarting: Callable[..., None],
    ) -> None:
        """Args: see `launch.local.start_workers`.

        Args:
            judge: says what failures on this machine come to.
            restarting: called with how the attempt ended, the number of the next, and how many there may be.
        """
        self._meeting = Meeting(nodes, nproc, lambda: self._repeats.first is not None)
        spec = WorkerSpec(
            role="default_role",
            local_world_size=nproc,
            entrypoint=sys.executable,
            args=("-P", *words),  # -P keeps the working directory off the workers' path
            rdzv_handler=self._meeting,
            max_restarts=max_restarts,
            monitor_interval=0.1,
        )
        redirects = dict.fromkeys(range(1, nproc), Std.ALL)
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=redirects))
        self._judge, self._restarting = judge, restarting
        self._repeats = Repeats()
        self._killed: set[int] = set()  # processes that we ended: they are no cause
        self.attempt = 0
        self.ended: Ended | None = None

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The signal that was passed on, if any."""
        return None if self._repeats.first is None else signal.Signals(self._repeats.first)

    def heed_signals(self) -> None:
        """From now on pass signals on, once; the second one ends everything."""
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # torch's handlers give the workers 30 seconds
        for number in heeded_signals():
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        first = self._repeats.first is None
        if self._repeats.ends_at_once(number):
            for process in self._running():
                self._kill(process)
            os.write(2, f"gramian: ended at once by {signal.Signals(number).name}, without a save\n".encode())
            os._exit(128 + number)
        if first:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """To the workers alone, and not to what these have started."""
        for process in self._running():
            process.send_signal(number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        most = worker_group.spec.max_restarts
        self._remaining_restarts = most - self._meeting.agreed("attempt", most - self._remaining_restarts)
        started: dict[int, int] = super()._start_workers(worker_group)
        self.heed_signals()  # an older torch puts its own in their place
        if self._repeats.first is not None:  # it came while there were none
            self._pass_on(self._repeats.first)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if any(process.poll() for process in self._processes()) or self._meeting.has_ended():
            self._let_the_rest_end()
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            self.attempt = worker_group.spec.max_restarts - self._remaining_restarts
            # Ended by the signal that was passed on, before they could heed it.
            ended_by = self.stopped_by or 0
            cut_off = any(f.exitcode in (-ended_by, 128 + ended_by) for f in result.failures.values())
            causes = {rank: f for rank, f in result.failures.items() if f.pid not in self._killed}
            mine = self._judge(self.attempt, causes or result.failures, self.stopped_by if cut_off else None)
            if not causes and mine.how.startswith("SIG"):  # another machine has the cause
                mine = mine._replace(how=_FOLLOWS, message=f"gramian: rank {mine.rank} was ended with the others")
            # A signal that comes later than this is for the workers of the next attempt.
            self.ended = self._agreed_on(mine._replace(retry=mine.retry and self._repeats.first is None))
            if not self.ended.retry:
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                self._restarting(self.ended, self.attempt + 1, worker_group.spec.max_restarts)
        elif result.state is WorkerState.SUCCEEDED:
            self._meeting.told(None)
        return result

    def _agreed_on(self, mine: Ended) -> Ended:
        """The end that all machines go by: of what each tells, what explains the rest."""
        told = self._meeting.told(mine._asdict())
        ends = [Ended(**{**t.verdict, "node": t.node, "host": t.host}) for t in told if t.verdict is not None]
        ended = min(ends, key=_explains)
        # What is done on one machine cannot be done again by the others.
        return ended if len(ends) == len(told) else ended._replace(retry=False)

    def _let_the_rest_end(self) -> None:
        """One has failed: the others have some seconds, but for those that a signal has stopped and that do nothing."""
        deadline = time.monotonic() + _SECONDS_AFTER_A_DEATH
        while (running := self._running()) and time.monotonic() < deadline:
            for process in running:
                if _is_stopped(process.pid):
                    self._kill(process)
            time.sleep(0.05)
        for process in self._running():
            self._kill(process)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a worker and what it has started."""
        self._killed.add(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be in the kernel, with a dead device
            process.wait(_SECONDS_AFTER_A_DEATH)

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in handlers.values()]

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes() if process.poll() is None]


def _explains(ended: Ended) -> tuple[int, float]:
    """The order in which ends of the same attempt are causes: an exit code that says why, a signal, the first fault."""
    if ended.exit_code in EXITS_THAT_EXPLAIN:
        return EXITS_THAT_EXPLAIN.index(ended.exit_code), ended.time
    return len(EXITS_THAT_EXPLAIN) + (not ended.how.startswith("SIG")) + (ended.how == _FOLLOWS), ended.time


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
