"""A user's own modules with the names of our packages do not take their place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.commands import BIN, command, environment, tiny
from tests.launch.conftest import Trained

_NAMES = ("data", "models", "common", "optim", "trainer")
_TRAP = "raise RuntimeError('a module of the user was imported')"


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A folder with modules that must not be imported, and a folder of corpora called `data`, as many have."""
    for name in _NAMES:
        (tmp_path / f"{name}.py").write_text(_TRAP)
    (tmp_path / "data").mkdir()
    return tmp_path


def test_gramian_trains_among_traps(users_folder: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two workers train, with the user's modules in the working directory and on PYTHONPATH."""
    runs = tmp_path_factory.mktemp("runs")
    # Our command stands in front of this one too, as it does not under torchrun.
    (users_folder / "launch.py").write_text(_TRAP)
    words = tiny(corpus, runs, "--nproc", "2", "train.steps=1", "eval.batches=0")
    result = command(*words, cwd=users_folder, PYTHONPATH=str(users_folder))
    assert (result.returncode, result.stderr) == (0, "")
    assert (runs / "tiny" / "checkpoints" / "step_00000001" / "COMMIT").exists()


@pytest.mark.parametrize("where", ["working directory", "PYTHONPATH"])
def test_gramian_in_each_place(trained: Trained, users_folder: Path, where: str) -> None:
    (users_folder / "launch.py").write_text(_TRAP)
    if where == "PYTHONPATH":
        result = command(*trained.words, PYTHONPATH=str(users_folder))
    else:
        result = command(*trained.words, cwd=users_folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert "is finished" in result.stdout


@pytest.mark.parametrize("where", ["working directory", "PYTHONPATH"])
def test_torchrun(trained: Trained, users_folder: Path, where: str) -> None:
    """The worker of the finished run reads every config module before it says so."""
    words = [word for word in trained.words[1:] if word not in ("--nproc", "2")]
    words = ["--nproc-per-node", "1", "-m", "launch.worker", *words]
    if where == "PYTHONPATH":
        result = command(*words, program="torchrun", PYTHONPATH=str(users_folder))
    else:
        result = command(*words, program="torchrun", cwd=users_folder)
    assert result.returncode == 0, result.stderr
    assert "is finished" in result.stdout


def test_launch_py_under_torchrun_has_a_way_round(trained: Trained, tmp_path: Path) -> None:
    """`-m launch.worker` is resolved before any line of ours runs, but torchrun can start `gramian` itself."""
    (tmp_path / "launch.py").write_text("")
    words = [word for word in trained.words if word not in ("--nproc", "2")]
    start = ["--nproc-per-node", "1", "--no-python", str(BIN / "gramian")]
    result = command(*start, *words, program="torchrun", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "is finished" in result.stdout


def test_module_that_came_first_is_named(tmp_path: Path) -> None:
    """One that was imported before we could act ends the process, with its file in the line."""
    (tmp_path / "data.py").write_text("")
    code = "import data, launch"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path / "data.py") in done.stderr
    assert "rename" in done.stderr
