"""Starting workers on this machine, through torch elastic (what torchrun is made of)."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import EXIT_BAD_INPUT
from common.machine import available_cores
from launch import ROOT
from launch.report_errors import TOLD_BY_LAUNCHER

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def start_workers(words: list[str], nproc: int, logs: Path) -> None:
    """Run `nproc` workers, each `python` with these words, and wait for them.

    Rank 0 has the terminal, the others write to files in `logs`, a folder that is there and empty.

    Raises:
        SystemExit: 2 after a worker's bad input, 1 after any other failure, as shells count it after a signal to us.
            The failure that came first is told, once.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Workers must find our packages before a module of the user's of the same name, and share the cores.
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // nproc)))
    os.environ["GRAMIAN_COMMAND"] = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    os.environ[TOLD_BY_LAUNCHER] = "1"
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"gramian-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",  # the host's own name may not resolve
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(range(1, nproc), Std.ALL)),
    )
    try:
        # -P keeps the working directory off the workers' path.
        elastic_launch(launch, sys.executable)("-P", *words)
    except ChildFailedError as error:
        message, exit_code = _first_failure(logs, error.failures)
        print(message, file=sys.stderr, flush=True)
        raise SystemExit(exit_code) from None
    except SignalException as stop:
        print(f"gramian: stopped by {stop.sigval.name}, and with it all workers", file=sys.stderr, flush=True)
        raise SystemExit(128 + stop.sigval) from None


def _first_failure(logs: Path, failures: Mapping[int, ProcessFailure]) -> tuple[str, int]:
    """What to tell of a failed start, and our exit code.

    When one worker ends, the others soon fail for want of it, or torch elastic ends them by SIGTERM: the report that
    was left first is the cause, unless a worker was ended by another signal, which leaves none.
    """
    reports: dict[int, dict[str, Any]] = {}
    for file in sorted(logs.glob("**/error.json"), key=lambda path: path.stat().st_mtime_ns):
        reports[int(file.parent.name)] = json.loads(file.read_text(encoding="utf-8"))
    for report in reports.values():
        if report["exit_code"] == EXIT_BAD_INPUT:
            return report["message"], EXIT_BAD_INPUT
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and rank not in reports:
            name = signal.Signals(-failure.exitcode).name
            why = ", perhaps because memory ran out" if name == "SIGKILL" else ""
            return f"gramian: rank {rank} was ended by {name}{why}{_output(logs, rank)}", 1
    for rank, report in reports.items():
        if report.get("whole"):
            return report["message"], 1
        return f"{report['message']}gramian: rank {rank} failed with this error{_output(logs, rank)}", 1
    rank, failure = next(iter(failures.items()))
    exit_code = EXIT_BAD_INPUT if failure.exitcode == EXIT_BAD_INPUT else 1
    return f"gramian: rank {rank} failed with exit code {failure.exitcode}{_output(logs, rank)}", exit_code


def ended_with_a_finding(logs: Path) -> bool:
    """Whether workers ended with a report that points to nothing in `logs`."""
    return any(json.loads(file.read_text(encoding="utf-8")).get("whole") for file in logs.glob("**/error.json"))


def _output(logs: Path, rank: int) -> str:
    """Where a rank's output is; rank 0's is on the terminal."""
    files = sorted(logs.glob(f"**/{rank}/stderr.log"))
    return f"; its output is in {files[-1].parent}" if files else ""
