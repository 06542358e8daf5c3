"""Running a benchmark as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def printed(script: str, *words: str, timeout: float = 200) -> str:
    """What `python benchmarks/SCRIPT` prints; the test fails with its errors if it does."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout
