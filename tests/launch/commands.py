"""Starting `gramian` as a user would, and what a refusal must look like."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.runs import TINY

BIN = Path(sys.executable).parent  # not resolved: the commands lie beside the interpreter of the environment
# What a launcher or a CI system may have set around the tests.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")


def environment(**variables: str) -> dict[str, str]:
    """The environment of a user's shell, with one thread so that tests leave room for one another."""
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def command(
    *words: str | Path, program: str = "gramian", cwd: Path | None = None, timeout: float = 90, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a console command to its end."""
    return subprocess.run(
        [str(BIN / program), *map(str, words)],
        env=environment(**variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def tiny(corpus: Path, folder: Path, *words: str) -> list[str]:
    """Words of `gramian train` for the tiny config, with its corpus and the folder of its runs."""
    return ["train", TINY, f"data.corpus={corpus}", f"run.dir={folder}", *words]


def assert_refused(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Exit code 2 and one line on standard error, which holds all of `parts`."""
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for part in parts:
        assert part in result.stderr
