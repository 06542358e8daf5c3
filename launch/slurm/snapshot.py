"""The code as it is now, for a job that may begin, or begin anew, when it has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from common.checkout import SNAPSHOT, commit_and_diff
from common.files import atomic_write
from launch import PACKAGES, ROOT

_OURS = {".py", ".yaml"}


def take_snapshot(folder: Path) -> None:
    """Copy the packages into `folder`, with the commit and what has changed since."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*")):
            if file.suffix in _OURS and "__pycache__" not in file.parts:
                copy = folder / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
    shutil.copyfile(ROOT / "gramian.py", folder / "gramian.py")
    commit, diff = commit_and_diff(ROOT)
    record = {"commit": commit, "diff": diff, "taken_from": str(ROOT)}
    atomic_write(folder / SNAPSHOT, json.dumps(record, indent=1) + "\n")
