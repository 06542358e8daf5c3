"""What a start came to, in `outcome.json`: exit codes do not get through torchrun. Imports no torch.

The file is absent while a start goes on, and after one that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from common.errors import EXIT_BAD_INPUT, EXIT_HANG, EXIT_REQUEUE, Requeue, UserError
from common.files import atomic_write, locked
from common.ranks import attempt
from trainer.rundir import InUse, RunDirectory

Outcome = Literal["done", "requeue", "bad_input", "fault", "hang"]
_EXIT_CODES: dict[Outcome, int] = {
    "done": 0,
    "requeue": EXIT_REQUEUE,
    "bad_input": EXIT_BAD_INPUT,
    "fault": 1,
    "hang": EXIT_HANG,
}


def write_outcome(run: RunDirectory, outcome: Outcome, reason: str, of_attempt: int | None = None, **more: Any) -> None:
    """Say how the start ends. A run without a folder gets none.

    A fault that follows from what a rank has told already is not told. The launcher, which gives the number of the
    attempt, knows better, and `more`.
    """
    if not run.path.is_dir() or (outcome == "fault" and of_attempt is None and run.outcome_file.exists()):
        return
    record = {
        "outcome": outcome,
        "exit_code": _EXIT_CODES[outcome],
        "step": max(run.committed(), default=0),  # of the newest committed checkpoint
        "reason": reason,
        "attempt": attempt() if of_attempt is None else of_attempt,
        "time": round(time.time(), 3),
        **more,
    }
    with contextlib.suppress(OSError):  # a full disk
        atomic_write(run.outcome_file, json.dumps(record, indent=1) + "\n")


def outcome_of(exit_code: int) -> Outcome:
    """The outcome that an exit code stands for."""
    for outcome, code in _EXIT_CODES.items():
        if code == exit_code:
            return outcome
    return "fault"


def read_outcome(run: RunDirectory) -> dict[str, Any] | None:
    """The outcome of the last start, if it came to one."""
    try:
        record: dict[str, Any] = json.loads(run.outcome_file.read_bytes())
    except (OSError, ValueError):
        return None
    return record


@contextlib.contextmanager
def outcome_told(run: RunDirectory, owned: bool = False) -> Iterator[None]:
    """Write down what is wrong if this ends by an error. `owned`: this start has the run's directory, or a part in it.

    Otherwise what another start of the run does is left alone.
    """

    def tell(outcome: Outcome, reason: str) -> None:
        mine = owned or not run.path.is_dir()
        with contextlib.suppress(OSError), contextlib.nullcontext() if mine else locked(run.lock_file, wait=False):
            write_outcome(run, outcome, reason)

    try:
        yield
    except InUse:
        raise
    except UserError as error:
        tell("bad_input", str(error))
        raise
    except Requeue as requeue:
        if not owned:  # with the directory the loop has said so
            tell("requeue", str(requeue))
        raise
    except Exception as error:
        tell("fault", f"{type(error).__name__}: {error}")
        raise


def settled_before(run: RunDirectory) -> int | None:
    """The exit code of an attempt before this one, of the same launcher, after which there is nothing to try again."""
    record = read_outcome(run)
    if attempt() == 0 or record is None or record["outcome"] not in ("requeue", "bad_input"):
        return None
    try:
        launcher_started = Path(f"/proc/{os.getppid()}").stat().st_ctime
    except OSError:
        return None
    return int(record["exit_code"]) if record["time"] > launcher_started else None
