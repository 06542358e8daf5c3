"""Where each rank is, and a watch over all of them that ends a gang that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.errors import EXIT_HANG
from common.ranks import attempt

# What a rank does, in the order of a step, and how long it may take, in units of `train.hang_minutes`.
_LIMITS = {
    "data set-up": math.inf,  # it takes what the corpus takes
    "set-up": 3.0,
    "data": 1.0,
    "the step": 1.0,
    "evaluation": 1.0,
    "the save": 3.0,
}
LONGEST = 3.0  # also for the first time at a place: it may compile
_ORDER = list(_LIMITS)
FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"


class Pulse:
    """Where this rank is. Without a watch over it nobody looks."""

    def __init__(self) -> None:
        self.place, self.step, self.since = "data set-up", 0, time.monotonic()
        self._been: set[str] = set()
        self.waits = False  # for other ranks, in one of our sums
        self._waited = 0.0
        self._left = time.monotonic()

    def at(self, place: str, step: int | None = None) -> None:
        """From now on this rank is at one of the places above."""
        self._been.add(self.place)
        self.place, self.since = place, time.monotonic()
        self.step = self.step if step is None else step

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done here waits for the other ranks."""
        self.waits, begin = True, time.monotonic()
        yield
        self.waits = False
        self._waited += time.monotonic() - begin

    @property
    def limit(self) -> float:
        """How long this rank may be where it is, in units of `train.hang_minutes`."""
        return _LIMITS[self.place] if self.place in self._been else max(_LIMITS[self.place], LONGEST)

    def own_seconds(self) -> float:
        """Time since the last call, without what was waited."""
        now = time.monotonic()
        own = now - self._left - self._waited
        self._left, self._waited = now, 0.0
        return own

    def beat(self) -> dict[str, Any]:
        """For the other ranks. Clocks of machines differ by little beside the limits."""
        seconds = time.monotonic() - self.since
        beat = {"place": self.place, "step": self.step, "seconds": seconds, "waits": self.waits, "time": time.time()}
        return {**beat, "host": socket.gethostname()}


@contextlib.contextmanager
def watching(
    pulse: Pulse,
    rank: int,
    world_size: int,
    minutes: float | None,
    logs: Path,
    tell: Callable[[str, int], None],
) -> Iterator[None]:
    """While the context lasts, a thread ends this process where its rank, or another, stays too long at one place.

    Args:
        minutes: `train.hang_minutes`.
        logs: the folder for stacks.
        tell: called with what to tell of it and the step, on the one rank that tells.
    """
    if minutes is None:
        yield
        return
    watch = _Watch(pulse, rank, world_size, 60 * minutes, logs, tell)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class _Watch(threading.Thread):
    """Publishes this rank's pulse in the group's store, and looks at the others' when something takes too long."""

    def __init__(
        self, pulse: Pulse, rank: int, world_size: int, limit: float, logs: Path, tell: Callable[[str, int], None]
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._pulse, self._rank, self._world, self._limit = pulse, rank, world_size, limit
        self._logs, self._tell = logs, tell
        self._interval = min(5.0, limit / 10)
        self._patience = max(1.0, self._interval)
        self._talk = ThreadPoolExecutor(1, "pulse")
        self._ended = threading.Event()
        # A connection of its own: the main thread may hold the other one while it waits.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore("pulse", store if world_size == 1 else store.clone())

    def stop(self) -> None:
        """The context is over."""
        self._ended.set()
        self.join()
        self._talk.shutdown(wait=False, cancel_futures=True)

    def run(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(self._interval):
            gap, looked = time.monotonic() - looked, time.monotonic()
            # This process was stopped, or its machine slept: nobody's fault. A store that does not answer takes less.
            if gap > 3 * self._interval + self._patience:
                self._pulse.since += gap
            told = self._asked(self._publish)
            beat = self._pulse.beat()
            if (told or beat["seconds"] > self._pulse.limit * self._limit) and not self._ended.is_set():
                self._end(beat)

    def _end(self, beat: dict[str, Any]) -> None:
        """Leave stacks, tell once for the gang, and be gone, so that the launcher can begin anew."""
        name = f"hang-attempt-{attempt()}-step-{beat['step']:08d}-rank-{self._rank}"
        with contextlib.suppress(OSError):
            self._logs.mkdir(parents=True, exist_ok=True)
            with open(self._logs / f"{name}.txt", "a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
            if recorded := _flight_record():
                (self._logs / f"{name}.json").write_text(recorded, encoding="utf-8")
        if self._asked(self._store.add, "hang", 1) in (1, None):
            beats = self._asked(self._beats, beat)
            if beats is None:
                kept = f" at {os.environ['MASTER_ADDR']}" if "MASTER_ADDR" in os.environ else ""
                fault = f"rank 0, or who else keeps the ranks' store{kept}, does not answer, and rank {self._rank} is "
                fault += f"in {_place(beat)}"
            else:
                fault = whose_fault(beats, self._rank, self._world, 4 * self._interval)
            self._tell(f"no progress: {fault}; stacks are in {self._logs}", beat["step"])
            self._ended.wait(2 * self._interval)  # the others leave theirs
        os._exit(EXIT_HANG)

    def _asked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the store answers; None where whoever keeps it is gone, or hangs: nobody may wait for that."""
        try:
            return self._talk.submit(function, *arguments).result(timeout=self._patience)
        except (RuntimeError, TimeoutError):
            return None

    def _publish(self) -> bool:
        """Tell where this rank is; whether another has found that the gang hangs."""
        self._store.set(str(self._rank), json.dumps(self._pulse.beat()))
        return self._world > 1 and bool(self._store.check(["hang"]))

    def _beats(self, mine: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The last pulse of every rank that can be known."""
        beats = {self._rank: mine}
        for rank in range(self._world):
            if rank != self._rank and self._store.check([str(rank)]):
                beats[rank] = json.loads(self._store.get(str(rank)))
        return beats


def whose_fault(beats: dict[int, dict[str, Any]], rank: int, world_size: int, silence: float) -> str:
    """Who keeps a gang from going on, as `rank` sees it: who gives no sign of life for `silence` seconds, or else who
    is behind the others."""
    now = time.time()
    several = len({beat["host"] for beat in beats.values()}) > 1

    def name(other: int) -> str:
        return f"rank {other} on {beats[other]['host']}" if several else f"rank {other}"

    unseen = [other for other in range(world_size) if other not in beats]
    silent = {other: beat for other, beat in beats.items() if other != rank and now - beat["time"] > silence}
    if unseen or silent:
        return "; ".join(
            [f"rank {other} was never seen" for other in unseen]
            + [
                f"{name(other)} gave no sign of life for {now - beat['time']:.0f} s, last seen in {_place(beat)}"
                for other, beat in silent.items()
            ]
        )
    progress = {other: (b["step"], _ORDER.index(b["place"]), b["waits"]) for other, b in beats.items()}
    behind = [other for other, at in progress.items() if at == min(progress.values())]
    if len(behind) == world_size > 1:
        return f"all ranks are in {_place(beats[rank])}, for {beats[rank]['seconds']:.0f} s"
    return "; ".join(
        f"{name(other)} did not come on from {_place(beats[other])}, where it is for {beats[other]['seconds']:.0f} s"
        for other in behind
    )


def _place(beat: dict[str, Any]) -> str:
    where = f"{beat['place']}, step {beat['step']}" if beat["step"] else beat["place"]
    return f"{where}, waiting for the others" if beat["waits"] else where


def _flight_record() -> str | None:
    """torch's record of the last collectives; None where the backend keeps none."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    try:
        text = dump() if dump is not None and os.environ.get(FLIGHT_RECORDER) else b""
    except RuntimeError:
        return None
    return (text.decode() if isinstance(text, bytes) else text) or None
