"""Starting workers on this machine, through torch elastic (what torchrun is made of)."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import EXIT_BAD_INPUT, EXIT_HANG, EXIT_REQUEUE, EXITS_THAT_EXPLAIN
from common.machine import available_cores
from common.nodes import Nodes
from launch import python_path
from launch.network import choose_interface
from launch.report_errors import TOLD_BY_LAUNCHER
from trainer.outcome import outcome_of, read_outcome, write_outcome
from trainer.rundir import RunDirectory
from trainer.stop import STARTED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from launch.elastic import Ended


def start_workers(
    words: list[str],
    nproc: int,
    logs: Path,
    run: RunDirectory | None = None,
    max_restarts: int = 0,
    nodes: Nodes | None = None,
) -> None:
    """Run `nproc` workers, each `python` with these words, and wait for them; on each of several machines, if `nodes`.

    Rank 0 has the terminal, the others write to files in `logs`, a folder that is there and empty. Workers that die,
    hang or fail are started again, all of them, up to `max_restarts` times; they are then those of `run`.

    Raises:
        SystemExit: 2 after a worker's bad input, 75 where they were told to stop, 70 after a hang, 1 after any other
            failure. The failure that came first is told, once.
    """
    from launch.elastic import Agent

    nodes = nodes or Nodes()
    os.environ["PYTHONPATH"] = python_path()
    # Workers share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // nproc)))
    os.environ["GRAMIAN_COMMAND"] = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    os.environ[TOLD_BY_LAUNCHER] = str(os.getpid())
    os.environ[STARTED] = str(time.time())
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def judge(attempt: int, failures: Mapping[int, ProcessFailure], cut_off_by: signal.Signals | None) -> Ended:
        ended = _judge(logs, attempt, failures, run, nodes.rank * nproc)
        if cut_off_by is not None and ended.exit_code not in (EXIT_BAD_INPUT, EXIT_REQUEUE):
            # What workers had not begun to train, or had finished but for a sample, is lost with nothing to save.
            message = f"gramian: stopped by {cut_off_by.name}, and with it all workers"
            code = EXIT_REQUEUE if run is not None else 128 + cut_off_by
            ended = ended._replace(message=message, exit_code=code)
        return ended._replace(time=time.time())

    def restarting(ended: Ended, number: int, of: int) -> None:
        assert run is not None
        step = max(run.committed(), default=0)
        if nodes.rank == 0:
            run.outcome_file.unlink(missing_ok=True)  # a hang's: it is not the end
            host = _host(ended, nodes)
            run.events.record("restart", attempt=number, rank=ended.rank, how=ended.how, step=step, **host)
        line = f"restart {number} of {of}, from step {step}"
        print(f"{_told_here(ended, nodes)}\ngramian: {line}", file=sys.stderr, flush=True)

    if nodes.total > 1:
        choose_interface(nodes.host)
    agent = Agent(words, nproc, nodes, logs, max_restarts, judge, restarting)
    agent.heed_signals()
    result = agent.run()
    if not result.is_failed():
        return
    ended = agent.ended
    assert ended is not None
    if run is not None and nodes.rank == 0:
        outcome, reason = outcome_of(ended.exit_code), _reason(ended.message)
        write_outcome(run, outcome, reason, agent.attempt, retry=ended.retry, **_host(ended, nodes))
    print(_told_here(ended, nodes), file=sys.stderr, flush=True)
    raise SystemExit(ended.exit_code)


def _host(ended: Ended, nodes: Nodes) -> dict[str, str]:
    """Where it ended, if there are several places."""
    return {"host": ended.host} if nodes.total > 1 else {}


def _told_here(ended: Ended, nodes: Nodes) -> str:
    """What a launcher says of an end: the whole where it happened, a line on other machines."""
    if ended.node == nodes.rank:
        return ended.message.rstrip()
    return f"gramian: machine {ended.node} ({ended.host}): {_reason(ended.message)}"


def _judge(
    logs: Path, attempt: int, failures: Mapping[int, ProcessFailure], run: RunDirectory | None, first_rank: int = 0
) -> Ended:
    """What the failures of an attempt come to, on a machine whose ranks begin with `first_rank`.

    When one worker ends, the others soon fail for want of it, or are ended: the report that was left first is the
    cause, unless a worker was ended by a signal, which leaves none.
    """
    from launch.elastic import Ended

    def output(rank: int) -> str:
        return _output(logs, attempt, rank - first_rank)

    reports: dict[int, dict[str, Any]] = {}
    for file in sorted(logs.glob(f"**/attempt_{attempt}/*/error.json"), key=lambda path: path.stat().st_mtime_ns):
        reports[first_rank + int(file.parent.name)] = json.loads(file.read_text(encoding="utf-8"))
    for wanted in EXITS_THAT_EXPLAIN:
        for rank, report in reports.items():
            if report["exit_code"] == wanted:
                how = "hang" if wanted == EXIT_HANG else f"exit code {wanted}"
                return Ended(rank, how, report["message"], wanted, retry=wanted == EXIT_HANG)
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and rank not in reports:
            name = signal.Signals(-failure.exitcode).name
            why = ", perhaps because memory ran out" if name == "SIGKILL" else ""
            message = f"gramian: rank {rank} was ended by {name}{why}{output(rank)}"
            return Ended(rank, name, message, 1, retry=True)
    # What failed before the first step would fail again.
    retry = run is not None and any(
        event["event"] == "running" and event["attempt"] == attempt and event["time"] > float(os.environ[STARTED])
        for event in run.events.read()
    )
    for rank, report in reports.items():
        if report.get("whole"):
            return Ended(rank, "exit code 1", report["message"], 1, retry=False)
        message = f"{report['message']}gramian: rank {rank} failed with this error{output(rank)}"
        return Ended(rank, "exit code 1", message, 1, retry)
    rank, failure = next(iter(failures.items()))
    known = failure.exitcode in EXITS_THAT_EXPLAIN
    retry = failure.exitcode == EXIT_HANG if known else retry
    if failure.exitcode == EXIT_REQUEUE and run is not None and (outcome := read_outcome(run)):  # told by rank 0
        return Ended(rank, "exit code 75", f"gramian: {outcome['reason']}", EXIT_REQUEUE, retry=False)
    message = f"gramian: rank {rank} failed with exit code {failure.exitcode}{output(rank)}"
    return Ended(rank, f"exit code {failure.exitcode}", message, failure.exitcode if known else 1, retry)


def ended_with_a_finding(logs: Path) -> bool:
    """Whether workers ended with a report that points to nothing in `logs`."""
    return any(json.loads(file.read_text(encoding="utf-8")).get("whole") for file in logs.glob("**/error.json"))


def _reason(message: str) -> str:
    """The line of a report that says what was wrong: of a traceback the last."""
    lines = [line for line in message.strip().splitlines() if " failed with this error" not in line]
    return re.sub(r"^gramian( \[rank \d+\])?: ", "", lines[-1]) if lines else message


def _output(logs: Path, attempt: int, local_rank: int) -> str:
    """Where a rank's output is; that of a machine's first one is on the terminal."""
    files = sorted(logs.glob(f"**/attempt_{attempt}/{local_rank}/stderr.log"))
    return f"; its output is in {files[-1].parent}" if files else ""
