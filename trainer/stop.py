"""Being told to stop (rule 9): by a signal, or because the time that is allowed runs out. Imports no torch.

Here a rank only learns of it. That all ranks stop at the same step is agreed in `Runtime.count`, and what they then do
stands in `trainer/ending.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STARTED = "GRAMIAN_STARTED"  # when our launcher was started: restarts of workers do not begin the time anew
# SLURM and torchrun deliver a signal twice, one directly and one through the launcher.
_REPEAT_SECONDS = 5.0


def heeded_signals() -> list[signal.Signals]:
    """Those of `SIGNALS` that this process is to heed: what a shell made its background jobs ignore stays ignored."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class Stopping(Exception):
    """All ranks have agreed to stop before what comes next."""


class Repeats:
    """Tells the second signal that ends at once from the one that is merely delivered twice."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._time = 0.0

    def ends_at_once(self, number: int) -> bool:
        """Take note of a signal. True: it is another one than the first, or the same well after it."""
        if self.first is None:
            self.first, self._time = number, time.monotonic()
            return False
        return number != self.first or time.monotonic() - self._time > _REPEAT_SECONDS


class Stop:
    """Whether this rank was told to stop."""

    def __init__(self) -> None:
        self._repeats = Repeats()
        self._limit: TimeLimit | None = None

    @property
    def reason(self) -> str | None:
        """The name of the signal, or of the limit that is near; None: go on."""
        if self._repeats.first is not None:
            return signal.Signals(self._repeats.first).name
        return self._limit.reason if self._limit is not None and self._limit.is_near() else None

    def signalled(self, number: int) -> None:
        """Take note of a signal. A second one ends this process here and now, whatever it is waiting for."""
        if self._repeats.ends_at_once(number):
            os.write(2, f"gramian: ended at once by {signal.Signals(number).name}, without a save\n".encode())
            os._exit(128 + number)

    def limit(self, max_hours: float | None) -> None:
        """Stop in time for `train.max_hours`, and for the end of the SLURM job if this is one. For one of the ranks."""
        self._limit = TimeLimit.of(max_hours, os.environ, time.time())

    def saves_take(self, seconds: float) -> None:
        """How long a save takes, as measured."""
        if self._limit is not None:
            self._limit.save_seconds = seconds


class TimeLimit:
    """The moment at which this process must be gone, and how long before it the last save must begin."""

    def __init__(self, until: float, reason: str, now: float) -> None:
        self.reason = reason
        self._until = until
        self._asked = now
        self._near = False
        self._step_seconds = 0.0  # a long one is forgotten in some tens of steps: the first may have compiled
        # Of the first save nothing is known.
        self.save_seconds = min(120.0, max(0.0, until - now) / 20)

    @classmethod
    def of(cls, max_hours: float | None, environment: Mapping[str, str], now: float) -> TimeLimit | None:
        """The earlier of both limits, if there is any."""
        limits = []
        if max_hours is not None:
            limits.append((float(environment.get(STARTED, now)) + 3600 * max_hours, "train.max_hours"))
        if (end := environment.get("SLURM_JOB_END_TIME", "")).isdecimal():
            limits.append((float(end), "the end of the SLURM job"))
        return cls(*min(limits), now) if limits else None

    def is_near(self) -> bool:
        """Whether a step like the longest of late and then a save would end too late; once so, for good.

        To be asked at every step.
        """
        now = time.time()
        self._step_seconds = max(now - self._asked, 0.9 * self._step_seconds)
        self._asked = now
        self._near = self._near or now + 2 * (self._step_seconds + self.save_seconds) > self._until
        return self._near


@contextmanager
def heed_signals() -> Iterator[Stop]:
    """Until the context ends, SIGTERM, SIGINT and SIGUSR1 only raise a flag.

    A thread reads them, as the main one may be in a collective, where Python runs no handler, when the second comes.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def read() -> None:
        while numbers := reading.recv(16):
            for number in numbers:
                if number in SIGNALS:
                    stop.signalled(number)

    before = {number: signal.signal(number, lambda *_: None) for number in heeded_signals()}
    for number in before:
        signal.siginterrupt(number, False)  # libraries need not know that a call can be interrupted
    descriptor = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=read, name="signals", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:  # a stop that is complete ignores what comes late
                signal.signal(number, handler)
        writing.close()
        thread.join()
        reading.close()


def ignore_signals() -> None:
    """From here on nothing can disturb the end: the first rank that is gone makes torch elastic stop the others."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
