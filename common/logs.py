"""Logging that tells ranks apart. Numbers go to `metrics.jsonl`; this is for people."""

from __future__ import annotations

import logging
import sys

from common.ranks import read_place

_NAME = "gramian"


def get_logger() -> logging.Logger:
    """The project's logger: plain on rank 0; other ranks give their number and speak from warnings on."""
    return logging.getLogger(_NAME)


def setup_logging(quiet: bool = False) -> None:
    """Send progress to standard output, warnings to standard error, prefixed with the rank where there are several.

    Standard error is for what is wrong: bad input is one line there, whatever was done before it was found.

    Args:
        quiet: leave progress out, where standard output is for something else.
    """
    place = read_place()
    prefix = f"[rank {place.rank}] " if place.rank > 0 else ""
    progress, warnings = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    progress.addFilter(lambda record: record.levelno < logging.WARNING)
    warnings.setLevel(logging.WARNING)
    logger = get_logger()
    logger.handlers[:] = [progress, warnings]
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    logger.propagate = False
    logger.setLevel(logging.INFO if place.rank == 0 and not quiet else logging.WARNING)
