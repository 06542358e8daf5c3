"""This process's place among the others, as the environment tells it. Imports no torch."""

from __future__ import annotations

import os
from typing import NamedTuple

from common.errors import UserError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    """Which of how many processes this is, and which on its machine."""

    rank: int
    world_size: int
    local_rank: int


def is_worker() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def read_place() -> Place:
    """Read RANK, WORLD_SIZE and LOCAL_RANK; a process that was started alone is rank 0 of 1.

    Raises:
        UserError: variables that are incomplete, not numbers, or contradict one another.
    """
    if not is_worker():
        return Place(0, 1, 0)
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set though {'RANK' if 'RANK' in os.environ else 'WORLD_SIZE'} is; "
            f"start workers with torchrun or `gramian train --nproc N`, or unset RANK and WORLD_SIZE"
        )
    rank, world_size, _ = _number("RANK"), _number("WORLD_SIZE"), _number("MASTER_PORT")
    if rank >= world_size:
        raise UserError(
            f"RANK is {rank} but WORLD_SIZE is {world_size}: ranks are numbered 0 to WORLD_SIZE - 1; "
            f"start workers with torchrun or `gramian train --nproc N`"
        )
    # Without LOCAL_RANK all ranks are taken to be on this machine; on a machine without GPUs it does not matter.
    return Place(rank, world_size, _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank)


def attempt() -> int:
    """How often torch elastic has restarted this gang."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def ranks_on_this_machine() -> int | None:
    """LOCAL_WORLD_SIZE, as torchrun sets it; None where nobody tells."""
    return _number("LOCAL_WORLD_SIZE") if os.environ.get("LOCAL_WORLD_SIZE") else None


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise UserError(f"environment variable {name} must be a number, got {text!r}; let torchrun set it, or unset it")
    return int(text)
