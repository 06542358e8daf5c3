"""How a command ends: the user's mistakes in one line with exit code 2, faults with a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import EXIT_BAD_INPUT, UserError


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a `UserError` into one line on standard error and exit code 2. Ranks above 0 say who they are."""
    try:
        yield
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        who = "gramian" if rank == "0" else f"gramian [rank {rank}]"
        print(f"{who}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_BAD_INPUT) from None
