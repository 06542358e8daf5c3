"""What a job's script does, on its first node: start the step, pass signals on, and decide whether to begin anew.

`python -m launch.slurm.job --run DIR --submission DIR --max-requeues N -- srun ...`. Decisions are made from the run's
`outcome.json`, since neither srun nor SLURM knows a job that was told to stop and saved from one that is done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from common.checkout import read_snapshot
from common.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_REQUEUE, UserError
from common.files import atomic_write
from launch.slurm.control import SlurmError, host_names, show_jobs, show_node, slurm, time_of
from launch.slurm.step import RDZV, shown_meeting_point

FAULTS_TO_EXCLUDE = 2  # by a node
FAULTS_IN_A_ROW = 3  # without a checkpoint between them
CANCEL = "cancel"  # in the submission's folder: what `gramian slurm cancel` has asked to end


class After(NamedTuple):
    """What follows the end of a step."""

    requeue: bool
    exit_code: int
    why: str
    fault: bool = False  # one that another start may get past


def decide(outcome: dict[str, Any] | None, code: int, state: str, restarts: int, most: int, cancelled: bool) -> After:
    """What to do when the step has ended.

    Args:
        outcome: `outcome.json` of this start; None: it came to none.
        code: srun's exit code, 128 + n or more where a task was ended by a signal.
        state: of the job, as SLURM has it.
        restarts: how often SLURM has started it again.
        most: how often it may.
    """
    what = outcome["outcome"] if outcome is not None else None
    own = EXIT_REQUEUE if what == "requeue" else code or EXIT_FAILED
    if what == "done" and code == 0:
        return After(False, 0, "done")
    if cancelled or state.startswith("CANCELLED"):
        return After(False, own, "cancelled")
    if what == "bad_input":
        return After(False, EXIT_BAD_INPUT, "bad input, which another start would meet again")
    again = what in ("requeue", "hang", None) or (outcome or {}).get("retry") or code >= 128
    if not again:
        return After(False, own, "a fault, which another start would meet again")
    if restarts >= most:
        return After(
            False, own, f"it was started again {restarts} times, and max_requeues is {most}", what != "requeue"
        )
    return After(True, own, outcome["reason"] if outcome else "the step was killed", what != "requeue")


class History:
    """Of a run's starts by jobs: which nodes they had, how they ended, and what nodes are to be blamed for."""

    def __init__(self, run: Path) -> None:
        self._file = run / "slurm" / "history.json"
        try:
            known = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = {}
        self.open: dict[str, Any] | None = known.get("open")  # the start that has no end yet
        self.faults: dict[str, int] = known.get("faults", {})
        self.stuck: list[int] = known.get("stuck", [])  # steps of the newest checkpoints at faults in a row

    def begin(self, nodes: list[str]) -> list[str]:
        """Note a start. If the one before was cut off, blame those of its nodes that went down; return them."""
        lost = [n for n in self.open["nodes"] if _went_down(n, self.open["time"])] if self.open is not None else []
        for node in lost:
            self.blame(node)
        self.open = {"nodes": nodes, "time": time.time()}
        self._write()
        return lost

    def end(self, after: After, step: int, node: str | None) -> bool:
        """Note how a start ended; whether faults without progress are too many to go on."""
        self.open = None
        if node is not None:
            self.blame(node)
        self.stuck = [*(s for s in self.stuck if s == step), step] if after.fault else []
        self._write()
        return len(self.stuck) >= FAULTS_IN_A_ROW

    def blame(self, node: str) -> None:
        """Count a fault of a node."""
        self.faults[node] = self.faults.get(node, 0) + 1

    @property
    def excluded(self) -> list[str]:
        """Nodes that no start is to have again."""
        return sorted(node for node, faults in self.faults.items() if faults >= FAULTS_TO_EXCLUDE)

    def _write(self) -> None:
        record = {"open": self.open, "faults": self.faults, "stuck": self.stuck}
        atomic_write(self._file, json.dumps(record, indent=1) + "\n")


def _went_down(node: str, since: float) -> bool:
    """Whether a node is down, or its SLURM daemon was started anew."""
    with contextlib.suppress(SlurmError, ValueError, KeyError):
        record = show_node(node)
        if "DOWN" in record["State"] or "*" in record["State"]:  # the star: it does not answer
            return True
        return time_of(record, "SlurmdStartTime") > since
    return False


class Job:
    """This job, or this element of an array."""

    def __init__(self, run: Path, submission: Path, most: int) -> None:
        self.run, self._submission, self._most = run, submission, most
        array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        # An element whose own number is the array's would stand for all of it.
        self.id = f"{array}_{element}" if array and element else os.environ["SLURM_JOB_ID"]
        self.restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._history = History(run)

    def train(self, command: list[str]) -> int:
        """Run the step to its end; the exit code of the job, which is another one's if it was requeued."""
        nodes = host_names(os.environ["SLURM_JOB_NODELIST"])
        code = self._submission / "code"
        say(f"job {self.id} on {', '.join(nodes)}, start {self.restarts + 1}; code {code}{_commit(code)}")
        for node in self._history.begin(nodes):
            say(f"node {node} went down in the start before: fault {self._history.faults[node]} of it")
        if set(nodes) & set(self._history.excluded) and self.restarts < self._most:
            return self._requeue("a node that failed twice is among its nodes")
        job = os.environ["SLURM_JOB_ID"]
        os.environ[RDZV] = shown_meeting_point(os.environ, int(job))
        if "SLURM_JOB_END_TIME" not in os.environ and (end := _end_time(job)) is not None:
            os.environ["SLURM_JOB_END_TIME"] = str(end)
        say(f"meeting at {os.environ[RDZV]}")
        begin = time.time()
        status = run_step(command, job)
        outcome = self._outcome(begin)
        state = _state(next(iter(show_jobs(job)), {}))
        cancelled = (self._submission / f"{CANCEL}-{self.id}").exists()
        after = decide(outcome, status, state, self.restarts, self._most, cancelled)
        blamed = _node_of((outcome or {}).get("host"), nodes) if after.fault else None
        if state not in ("RUNNING", "CANCELLED", "TIMEOUT"):
            # After a preemption, a node's failure or by hand: nothing is left to do, and the next start looks for nodes
            # that went down.
            say(f"SLURM has requeued it ({state}): {after.why}")
            return after.exit_code
        stuck = self._history.end(after, (outcome or {}).get("step", 0), blamed)
        if after.requeue and stuck:
            say(f"not started again: {FAULTS_IN_A_ROW} faults in a row without a new checkpoint; the last: {after.why}")
            return after.exit_code
        if after.requeue:
            return self._requeue(after.why)
        say(f"the end: {after.why}")
        return after.exit_code

    def _outcome(self, begin: float) -> dict[str, Any] | None:
        """What the run came to in this start."""
        try:
            record: dict[str, Any] = json.loads((self.run / "outcome.json").read_bytes())
        except (OSError, ValueError):
            return None
        # That it was done before is told by a start that finds nothing to do.
        return record if record["time"] >= begin or record["outcome"] == "done" else None

    def _requeue(self, why: str) -> int:
        excluded = self._history.excluded
        without = f", without {', '.join(excluded)}" if excluded else ""
        say(f"requeue {self.restarts + 1} of {self._most}{without}: {why}")
        try:
            slurm("scontrol", "requeue", self.id)
            if excluded:
                slurm("scontrol", "update", f"JobId={self.id}", f"ExcNodeList={','.join(excluded)}")
        except SlurmError as error:
            say(f"SLURM did not requeue it: {error}; submit it again to go on")
            return EXIT_REQUEUE
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(300)  # SLURM ends this script
        return EXIT_REQUEUE


def run_step(command: list[str], job: str) -> int:
    """Run srun to its end; the exit code, as a shell counts it. Signals to this script are the step's to heed."""
    noted: list[int] = []
    for heeded in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(heeded, lambda number, _: noted.append(number))
    step = subprocess.Popen(command)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = step.wait(timeout=0.2)
            return status if status >= 0 else 128 - status
        while noted:
            number = noted.pop(0)
            # SLURM itself sends SIGTERM to the step too, whenever it sends it here.
            if number != signal.SIGTERM:
                with contextlib.suppress(SlurmError):
                    slurm("scancel", f"--signal={signal.Signals(number).name.removeprefix('SIG')}", job)


def _state(record: dict[str, str]) -> str:
    """A job's state. Of one whose nodes are being cleared, what for, if that is its time limit."""
    state = record.get("JobState", "")
    return "TIMEOUT" if state == "COMPLETING" and record.get("Reason") == "TimeLimit" else state


def _end_time(job: str) -> int | None:
    """When the job's time is over, for SLURMs that do not tell it in the environment; None: never, or not known."""
    with contextlib.suppress(SlurmError, ValueError, IndexError):
        return int(time_of(show_jobs(job)[0], "EndTime"))
    return None


def _node_of(host: str | None, nodes: list[str]) -> str | None:
    """SLURM's name of a machine, by the name that it has for itself."""
    if len(nodes) == 1:
        return nodes[0]
    for node in nodes:
        with contextlib.suppress(SlurmError):
            if host is not None and host.partition(".")[0] in (node, show_node(node).get("NodeHostName")):
                return node
    return None


def _commit(code: Path) -> str:
    commit, diff = read_snapshot(code) or (None, None)
    return f" (commit {commit[:12]}{', with changes' if diff else ''})" if commit else ""


def say(line: str) -> None:
    """A line in the job's log."""
    print(f"gramian: {time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)


def main(arguments: list[str]) -> int:
    """Command line of a job's script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--submission", type=Path, required=True)
    parser.add_argument("--max-requeues", type=int, required=True)
    options, command = parser.parse_known_args(arguments)
    try:
        return Job(options.run, options.submission, options.max_requeues).train(command[command.index("--") + 1 :])
    except (UserError, SlurmError) as error:
        print(f"gramian: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
