"""Which code this is: the commit of the project's checkout and what has changed since, or what a copy of it says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

SNAPSHOT = "snapshot.json"  # in a copy of the code


def commit_and_diff(root: Path) -> tuple[str | None, str | None]:
    """The commit and the differences from it; None where nobody knows."""
    if (copy := read_snapshot(root)) is not None:
        return copy
    commit = _git(root, "rev-parse", "HEAD")
    return commit and commit.strip(), _git(root, "diff", "HEAD")


def read_snapshot(root: Path) -> tuple[str | None, str | None] | None:
    """The commit and the differences from it of a copy; None: it is none."""
    try:
        record = json.loads((root / SNAPSHOT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record["commit"], record["diff"]


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
