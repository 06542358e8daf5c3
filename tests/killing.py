"""A run in processes of its own whose processes are killed, and what it must come to all the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.launch.commands import BIN, environment, tiny
from tests.runs import losses_and_norms, read_state
from trainer.outcome import read_outcome
from trainer.rundir import RunDirectory

STEPS = 40
KEYS = (f"train.steps={STEPS}", "checkpoint.every=5", "checkpoint.keep=3", "eval.batches=0")


BY_GRAMIAN = ("gramian", "train", "--nproc", "2")
BY_TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--no-python")


class Launched:
    """The tiny config on two processes, started anew after each end of its launcher."""

    def __init__(
        self,
        corpus: Path,
        folder: Path,
        name: str,
        *more: str,
        by: tuple[str, ...] = BY_GRAMIAN,
        before: tuple[str, ...] = (),
        output: str = "",
    ) -> None:
        """`before`: words before the command; `output`: name of its output, if not the run's."""
        launcher = [*before, str(BIN / by[0]), *by[1:]]
        if by is BY_TORCHRUN:
            launcher += [str(BIN / "gramian"), "train"]
        self._words = [*launcher, *tiny(corpus, folder, f"run.name={name}", *KEYS, *more)[1:]]
        self._output = folder / f"{output or name}.txt"
        self.run = RunDirectory(folder / name)
        self.process: subprocess.Popen[bytes]
        self.stopped_at = 0.0

    def start(self) -> Launched:
        """Start the command, as a user would after whatever happened."""
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(self._words, env=environment(), stdout=output, stderr=output)
        return self

    @property
    def output(self) -> str:
        """What all starts have printed."""
        return self._output.read_text()

    def workers(self) -> dict[int, int]:
        """Process of each rank that is there."""
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True)
        found = {}
        for pid in map(int, listed.stdout.split()):
            try:
                text = Path(f"/proc/{pid}/environ").read_text()
            except OSError:
                continue
            variables = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
            if "RANK" in variables:
                found[int(variables["RANK"])] = pid
        return found

    def until(self, condition: Callable[[], Any], seconds: float = 120) -> Any:
        """Wait for something to be so; whether it came before the command ended."""
        deadline = time.monotonic() + seconds
        while not (result := condition()):
            assert time.monotonic() < deadline, self.output
            if self.process.poll() is not None:
                return condition()
            time.sleep(0.01)
        return result

    def committed(self) -> int:
        """Step of the newest checkpoint; 0: none yet."""
        return max(self.run.committed(), default=0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind, of all starts."""
        return [event for event in self.run.events.read() if event["event"] == kind]

    def kill(self, whom: str, generator: random.Random) -> bool:
        """SIGKILL `rank` (one of them), `ranks` (all) or `launcher`; False: it had ended before."""
        workers = self.workers()
        if self.process.poll() is not None or (whom != "launcher" and not workers):
            return False
        chosen = {"rank": [generator.choice(sorted(workers.values()))] if workers else [], "ranks": workers.values()}
        for pid in chosen.get(whom, [self.process.pid]):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
        if whom == "launcher":
            self.process.wait()
            deadline = time.monotonic() + 10
            while any(map(_is_alive, workers.values())):
                assert time.monotonic() < deadline, "workers outlive their launcher"
                time.sleep(0.01)
        return True

    def end(self) -> None:
        """Whatever a test left running."""
        workers = self.workers()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in workers.values():
            if _is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ended_alike(run: RunDirectory, unbroken: RunDirectory) -> None:
    """As below, of the runs that are launched here."""
    assert_same_end(run, unbroken, STEPS)


def assert_same_end(run: RunDirectory, unbroken: RunDirectory, steps: int) -> None:
    """All steps, the same numbers and the same weights and optimizer state, to the bit."""
    outcome = read_outcome(run)
    assert outcome is not None
    assert outcome["outcome"] == "done"
    assert losses_and_norms(run) == losses_and_norms(unbroken)
    ours, theirs = (read_state(each.checkpoint(steps)) for each in (run, unbroken))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
