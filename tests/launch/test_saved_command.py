"""`gramian checkpoint list` and `verify`, as a user calls them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.commands import command
from tests.launch.conftest import Ended, Trained
from trainer.rundir import RunDirectory

Gramian = Callable[..., Ended]


@pytest.fixture
def run(trained: Trained, tmp_path: Path) -> RunDirectory:
    """A copy of a run with two checkpoints."""
    return RunDirectory(Path(shutil.copytree(trained.run.path, tmp_path / "run")))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def test_list(run: RunDirectory, gramian: Gramian, tmp_path: Path) -> None:
    """Also what no start would take; numbers are those of the log and of the files."""
    shutil.copytree(run.checkpoint(6), run.checkpoint(7))
    (run.checkpoint(7) / "COMMIT").unlink()
    shutil.copytree(run.checkpoint(6), run.checkpoint(2))
    (run.checkpoint(2) / "tokenizer.model").write_bytes(b"")
    shutil.copytree(run.checkpoint(6), run.checkpoints / "step_00000004.damaged")
    done = gramian("checkpoint", "list", run.path, "--json", tmp_path / "list.json")
    assert (done.code, done.err) == (0, "")
    rows = json.loads((tmp_path / "list.json").read_text())["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [
        (2, "damaged"),
        (3, "committed"),
        (4, "damaged, put aside"),
        (6, "committed"),
        (7, "not committed"),
    ]
    logged = {row["step"]: row for row in run.read_metrics() if "loss" in row}
    evaluated = [row["eval_loss"] for row in run.read_metrics() if "eval_loss" in row]
    six = rows[3]
    assert (six["loss"], six["tokens"], six["eval_loss"]) == (logged[6]["loss"], logged[6]["tokens"], evaluated[-1])
    assert six["bytes"] == sum(path.stat().st_size for path in run.checkpoint(6).iterdir())
    lines = done.out.splitlines()
    for row in rows:
        (line,) = (line for line in lines if re.search(rf"^\W*{row['step']} ", line))
        assert f" {row['state']} " in line
        assert row["loss"] is None or f" {row['loss']:.4f} " in line
    assert json.loads(gramian("checkpoint", "list", run.path, "--json", "-").out)["checkpoints"] == rows


def test_verify_says_that_all_is_well(run: RunDirectory, gramian: Gramian, tmp_path: Path) -> None:
    size = {step: sum(p.stat().st_size for p in run.checkpoint(step).iterdir()) for step in (3, 6)}
    done = gramian("checkpoint", "verify", run.path)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{run.path}: 2 checkpoints, {sum(size.values()):,} bytes: all as written\n"
    done = gramian("checkpoint", "verify", run.checkpoint(3), "--workers", "3", "--json", tmp_path / "one.json")
    assert done.out == f"{run.checkpoint(3)}: 1 checkpoint, {size[3]:,} bytes: all as written\n"
    assert json.loads((tmp_path / "one.json").read_text()) == {
        "checkpoints": [str(run.checkpoint(3))],
        "bytes": size[3],
        "problems": [],
    }


@pytest.mark.parametrize(
    "name", ["COMMIT", "manifest.json", "trainer.json", "shard-00002-model-00001-of-00001.safetensors"]
)
@pytest.mark.parametrize("workers", [1, 4])
def test_verify_names_the_file(run: RunDirectory, gramian: Gramian, name: str, workers: int) -> None:
    folder = run.checkpoint(3)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    for target in (folder, run.path):
        done = gramian("checkpoint", "verify", target, "--workers", workers)
        assert done.code == 1
        assert done.out == f"{folder}/{name}: is damaged\n"
        assert len(done.err.splitlines()) == 1
        assert done.err.startswith(f"gramian: {folder}: damaged: {name}; bring it again")
    (report,) = json.loads(gramian("checkpoint", "verify", run.path, "--json", "-").out)["problems"]
    assert report == {"checkpoint": str(folder), "file": name, "what": "is damaged"}


def test_verify_of_what_was_never_committed(run: RunDirectory, gramian: Gramian) -> None:
    (run.checkpoint(6) / "COMMIT").unlink()
    done = gramian("checkpoint", "verify", run.checkpoint(6))
    assert (done.code, done.out) == (1, f"{run.checkpoint(6)}/COMMIT: missing\n")
    assert gramian("checkpoint", "verify", run.path).out.startswith(f"{run.path}: 1 checkpoint, ")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("verify {folder}/no", "no such run or checkpoint"),
        ("verify {folder}", "holds no committed checkpoint"),
        ("list {folder}", "no run with checkpoints"),
        ("list {folder}/no --json {folder}/no/x.json", "--json"),
        ("verify {run} --json {folder}/no/x.json", "--json"),
    ],
)
def test_wrong_input(trained: Trained, tmp_path: Path, gramian: Gramian, words: str, part: str) -> None:
    done = gramian("checkpoint", *words.format(run=trained.run.path, folder=tmp_path).split())
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert part in done.err


def test_exit_codes_of_the_command(run: RunDirectory) -> None:
    """In a process of its own, and without the time that torch takes to import."""
    flip(run.checkpoint(6) / "tokenizer.model")
    done = command("checkpoint", "verify", run.path, PYTHONPROFILEIMPORTTIME="1")
    assert (done.returncode, done.stdout) == (1, f"{run.checkpoint(6)}/tokenizer.model: is damaged\n")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "launch.saved" in imported
    assert "torch" not in imported
