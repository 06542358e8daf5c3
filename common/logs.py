"""Logging that tells ranks apart. Numbers go to `metrics.jsonl`; this is for people."""

from __future__ import annotations

import logging
import sys

from common.ranks import read_place

_NAME = "gramian"


def get_logger() -> logging.Logger:
    """The project's logger: plain on rank 0; other ranks give their number and speak from warnings on."""
    return logging.getLogger(_NAME)


def setup_logging() -> None:
    """Send the project's log to standard error, prefixed with the rank where there are several."""
    place = read_place()
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"[rank {place.rank}] " if place.rank > 0 else ""
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    logger = get_logger()
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if place.rank == 0 else logging.WARNING)
