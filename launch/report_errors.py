"""How a command ends: the user's mistakes in one line with exit code 2, failed checks in one with 1, faults with a
traceback."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from common.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_HANG, EXIT_REQUEUE, CheckFailed, Requeue, UserError

EXIT_INTERRUPTED = 130  # as a shell counts a process that Ctrl-C ended
# Set by our own launcher: the workers are quiet about their end, and the launcher tells it once.
TOLD_BY_LAUNCHER = "GRAMIAN_TOLD_BY_LAUNCHER"


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a `UserError` into one line on standard error and exit code 2. Ranks above 0 say who they are.

    A `CheckFailed` is one line too, with exit code 1, and a `Requeue` with 75.
    """
    try:
        yield
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        who = "gramian" if rank == "0" else f"gramian [rank {rank}]"
        _tell(f"{who}: {error}", EXIT_BAD_INPUT)
        raise SystemExit(EXIT_BAD_INPUT) from None
    except CheckFailed as failed:
        _tell(f"gramian: {failed}", EXIT_FAILED, whole=True)
        raise SystemExit(EXIT_FAILED) from None
    except Requeue as requeue:
        if os.environ.get("RANK", "0") == "0":
            _tell(f"gramian: {requeue}", EXIT_REQUEUE)
        raise SystemExit(EXIT_REQUEUE) from None
    except KeyboardInterrupt:
        if not _is_told_by_launcher():
            print("gramian: interrupted", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception:
        if not _is_told_by_launcher():
            raise
        _tell(traceback.format_exc(), 1)
        raise SystemExit(1) from None


def say_hang(message: str) -> None:
    """Tell of ranks that hang; this one is about to end."""
    _tell(f"gramian: {message}", EXIT_HANG)


def leave(code: int) -> NoReturn:
    """End a worker here and now, without taking the interpreter apart.

    Caches of torch's keep process groups, and so their threads, beyond the end of the group. A thread that meets a
    half-dead interpreter aborts the process: rarely, on a busy machine, after all the work was done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_told_by_launcher() -> bool:
    """Whether this is a worker of our launcher; the launcher itself has no report file."""
    return TOLD_BY_LAUNCHER in os.environ and "TORCHELASTIC_ERROR_FILE" in os.environ


def _tell(message: str, exit_code: int, whole: bool = False) -> None:
    """Print how this process ends, or leave it for our launcher where torch elastic keeps such reports.

    `whole`: there is nothing for the launcher to add, and another attempt would end the same way.
    """
    if _is_told_by_launcher():
        report = {"message": message, "timestamp": int(time.time()), "exit_code": exit_code}
        report |= {"whole": whole or exit_code in (EXIT_HANG, EXIT_REQUEUE)}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report), encoding="utf-8")
    else:
        print(message, file=sys.stderr, flush=True)
