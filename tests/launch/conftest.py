"""A run made once by the command, to look at from all sides."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launch.commands import command, tiny
from trainer.rundir import RunDirectory


@dataclass(frozen=True)
class Trained:
    """A finished run of six steps on two processes, and what the command printed."""

    run: RunDirectory
    folder: Path
    words: list[str]
    result: subprocess.CompletedProcess[str]


@pytest.fixture(scope="package")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    words = tiny(corpus, folder, "--nproc", "2", "train.steps=6", "checkpoint.every=3", "train.sample_prompt=def ")
    result = command(*words)
    assert result.returncode == 0, result.stderr
    return Trained(RunDirectory(folder / "tiny"), folder, words, result)


class Ended(NamedTuple):
    """How a command ended that ran in this process."""

    code: int
    out: str
    err: str


@pytest.fixture
def gramian(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    def run(*words: str | Path) -> Ended:
        from launch.cli import app

        code = 0
        try:
            app([*map(str, words)], standalone_mode=False)
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capsys.readouterr())

    return run
