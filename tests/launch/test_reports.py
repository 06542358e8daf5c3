"""What commands write beside their work: onto a full disk, into a pipe, into what is no place."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import UserError
from launch.data import run_inspect
from launch.reports import check_writable, write_json
from tests.datasets import make_dataset
from tests.faults import files_below
from tests.launch.commands import BIN, environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "tokens", ["a text", "and another"]).folder


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A named pipe and its end to read from."""
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    yield tmp_path / "pipe", end
    os.close(end)


def test_a_pipe_is_written_to_and_stays(folder: Path, pipe: tuple[Path, int]) -> None:
    path, end = pipe
    check_writable("--json", str(path))
    write_json(str(path), {"a": 1})
    assert os.read(end, 100) == b'{\n "a": 1\n}\n'
    run_inspect(folder, 0, path, None)
    assert os.read(end, 8) == b"\x89PNG\r\n\x1a\n"
    assert [(one.name, one.is_fifo()) for one in path.parent.iterdir()] == [("pipe", True)]


def test_no_room_for_a_report(folder: Path, tmp_path: Path) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "lengths.png"
    with files_below(1 << 13):
        with pytest.raises(UserError, match=f"--json {report}: cannot be written: File too large; make room"):
            write_json(str(report), {"long": "x" * 10_000})
        with pytest.raises(UserError, match=f"--plot {picture}: cannot be written: File too large; make room"):
            run_inspect(folder, 0, picture, str(report))
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    with pytest.raises(UserError, match=r"lengths\.gif: pictures are drawn as PNG"):
        run_inspect(folder, 0, tmp_path / "lengths.gif", None)


def test_no_room_for_the_output(folder: Path, tmp_path: Path) -> None:
    words = [str(BIN / "gramian"), "data", "inspect", str(folder), "--json", "-"]
    with open(tmp_path / "output", "w") as output, files_below(0):
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.PIPE, text=True, env=environment())
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (
        2,
        "gramian: --json -: cannot be written: File too large; make room, or give another file\n",
    )
