"""Saves in the background: what they hold, when they are made, and what becomes of one that fails."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.errors import UserError
from tests.gang import Gang
from tests.runs import TINY, Started, read_state, started, train_worker
from trainer.checkpoint import Checkpointer
from trainer.config import CheckpointConfig
from trainer.manifest import damage
from trainer.rundir import RunDirectory
from trainer.shard import Shard


@contextmanager
def saving(corpus: str, folder: str, **keys: Any) -> Iterator[tuple[Checkpointer, Started, RunDirectory]]:
    """In a rank: a tiny engine and what saves it."""
    with started([f"data.corpus={corpus}"]) as here:
        run = RunDirectory(Path(folder))
        yield Checkpointer(run, here.runtime, CheckpointConfig(**keys)), here, run


def save(checkpointer: Checkpointer, here: Started, step: int, last: bool = False) -> None:
    checkpointer.save(here.engine, {"step": step}, Path(TINY), last)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def change_at_once(corpus: str, folder: str) -> list[Any]:
    """In a rank: saves twice, and overwrites all of the state as soon as each save returns; what it was."""
    write, gate = Shard.write, threading.Event()

    def late(shard: Shard, *arguments: Any) -> Any:
        assert gate.wait(30)
        return write(shard, *arguments)

    with saving(corpus, folder) as (checkpointer, here, _), mock.patch.object(Shard, "write", late):
        memory, was = [], []
        for step in (1, 2):
            gate.clear()
            state = here.engine.state_dict()
            for tensor in state.values():
                local(tensor).add_(step)
            was.append({name: float(local(tensor).double().sum()) for name, tensor in state.items()})
            save(checkpointer, here, step)
            for tensor in state.values():
                local(tensor).fill_(-1)
            gate.set()
            checkpointer.wait()
            assert checkpointer._shard is not None
            assert checkpointer._shard._buffer is not None
            memory.append(checkpointer._shard._buffer.data_ptr())
        assert memory[0] == memory[1]
    return was


def test_what_changes_after_a_save_returns_is_saved_as_it_was(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """Into memory that is reused."""
    was = gang.run(change_at_once, str(corpus), str(tmp_path), world=2)
    run = RunDirectory(tmp_path)
    assert run.committed() == [1, 2]
    for step in (1, 2):
        state = read_state(run.checkpoint(step))
        sums = [ranks[step - 1] for ranks in was]
        for name, tensor in state.items():
            total = sum(s[name] for s in sums) if not name.endswith(".step") else sums[0][name]
            assert float(tensor.double().sum()) == pytest.approx(total, rel=1e-9), name
        assert damage(run.checkpoint(step)) == {}
    for event in (event for event in run.events.read() if event["event"] == "save"):
        assert event["stall_seconds"] <= event["seconds"] + 1
        assert event["bytes"] == sum(p.stat().st_size for p in run.checkpoint(1).glob("*.safetensors"))


def save_while_busy(corpus: str, folder: str, when: str) -> None:
    """In a rank: five saves, of which rank 1 is slow to write the first."""
    write, gate = Shard.write, threading.Event()

    def late(shard: Shard, *arguments: Any) -> Any:
        assert shard.name.startswith("shard-00001") or gate.wait(30)
        return write(shard, *arguments)

    keys = {"when_busy": when, "keep": 9, "keep_every": 4}
    with saving(corpus, folder, **keys) as (checkpointer, here, _), mock.patch.object(Shard, "write", late):
        save(checkpointer, here, 1)
        if when == "wait":
            gate.set()
        save(checkpointer, here, 2)
        save(checkpointer, here, 3)
        gate.set()
        save(checkpointer, here, 4)  # one of those that are kept for good
        gate.clear()
        threading.Timer(0.2, gate.set).start()
        save(checkpointer, here, 5, last=True)
        checkpointer.wait()


@pytest.mark.parametrize(("when", "expected"), [("skip", [1, 4, 5]), ("wait", [1, 2, 3, 4, 5])])
def test_a_save_that_is_due_while_another_runs(
    gang: Gang, corpus: Path, tmp_path: Path, when: str, expected: list[int]
) -> None:
    gang.run(save_while_busy, str(corpus), str(tmp_path), when, world=2)
    run = RunDirectory(tmp_path)
    assert run.committed() == expected
    skipped = [event["step"] for event in run.events.read() if event["event"] == "save_skipped"]
    assert skipped == [step for step in (2, 3) if step not in expected]


def due_by_the_clock(corpus: str, folder: str) -> list[list[int]]:
    """In a rank: the steps of ten after which a save is due; each takes 15 seconds, and on rank 1 none."""
    answers: list[list[int]] = []
    with started([f"data.corpus={corpus}"]) as here:
        for keys in ({"every": None, "every_minutes": 0.5}, {"every": 4}, {"every": None, "keep_every": 5}):
            clock = mock.Mock(return_value=0.0)
            with mock.patch("trainer.checkpoint.time.monotonic", clock):
                run = RunDirectory(Path(folder) / str(len(answers)))
                checkpointer = Checkpointer(run, here.runtime, CheckpointConfig(**keys))
                answers.append([])
                for step in range(1, 11):
                    clock.return_value += 15.0 * here.runtime.is_main
                    if checkpointer.due(step):
                        answers[-1].append(step)
                        save(checkpointer, here, step)
                checkpointer.wait()
    return answers


def test_when_saves_are_due(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """The clock is rank 0's, for all."""
    one, other = gang.run(due_by_the_clock, str(corpus), str(tmp_path), world=2)
    assert one == other
    assert one == [[2, 4, 6, 8, 10], [4, 8], [5, 10]]


def fail_to_save(corpus: str, folder: str, refusal: int) -> str:
    """In a rank: six saves, of which the second, fourth and fifth fail on rank 1; what the sixth says."""
    write = Shard.write

    def refuse(shard: Shard, where: Path, parts: Any) -> Any:
        entry = write(shard, where, parts)
        if shard.name.startswith("shard-00002") and int(where.name[-1]) in (2, 4, 5):
            raise OSError(refusal, "the disk says no")
        return entry

    keys = {"keep": 9, "max_failures": 2}
    with saving(corpus, folder, **keys) as (checkpointer, here, _), mock.patch.object(Shard, "write", refuse):
        for step in range(1, 6):
            save(checkpointer, here, step)
        try:
            save(checkpointer, here, 6)
        except (UserError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(("refusal", "kind"), [(errno.ENOSPC, "UserError: cannot save"), (errno.EIO, "RuntimeError")])
def test_failures_on_one_rank_are_known_to_all(
    gang: Gang, corpus: Path, tmp_path: Path, refusal: int, kind: str
) -> None:
    """One is told and gone over; nothing of it is left; two in a row end the run, on all ranks at the same step."""
    for told in gang.run(fail_to_save, str(corpus), str(tmp_path), refusal, world=2):
        assert told.startswith(kind)
        assert "the disk says no (rank 1)" in told
    run = RunDirectory(tmp_path)
    assert run.committed() == list(run.saved()) == [1, 3]
    failed = [event for event in run.events.read() if event["event"] == "save_failed"]
    assert [(event["step"], event["in_a_row"]) for event in failed] == [(2, 1), (4, 1), (5, 2)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of sixteen megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a file system is not permitted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def train_on_a_full_disk(arguments: list[str], ballast: str, checked: bool) -> tuple[int, str]:
    """In a rank: the exit code and the warnings of a worker whose disk is full from step 3 to 4.

    Without the check of free space the disk fills up in the middle of the save.
    """
    import trainer.loop

    step_at = trainer.loop.step_at

    def step_on_a_filling_disk(step: int, *rest: Any) -> Any:
        if rest[-2].is_main and step in (3, 5):
            time.sleep(0.3)  # the save before is done
            if step == 5:
                Path(ballast).unlink()
            else:
                with open(ballast, "wb", buffering=0) as file:
                    free = os.statvfs(ballast).f_bavail * os.statvfs(ballast).f_frsize
                    file.write(bytes(free if checked else free - 150_000))
        return step_at(step, *rest)

    plenty = mock.Mock(free=1 << 40)
    usage = shutil.disk_usage if checked else lambda path: plenty
    with (
        mock.patch("trainer.loop.step_at", step_on_a_filling_disk),
        mock.patch("trainer.checkpoint.shutil.disk_usage", usage),
        contextlib.redirect_stderr(io.StringIO()) as warnings,
    ):
        return train_worker(arguments), warnings.getvalue()


@pytest.mark.parametrize("checked", [True, False])
def test_a_full_disk(gang: Gang, corpus: Path, small_disk: Path, checked: bool) -> None:
    """Training goes on and says so, nothing committed is lost, and the next save is made when there is room."""
    words = [TINY, f"data.corpus={corpus}", f"run.dir={small_disk}", "checkpoint.every=2", "train.steps=6"]
    words += ["eval.batches=0", "checkpoint.keep=3"]
    run, ballast = RunDirectory(small_disk / "tiny"), small_disk / "ballast"
    (code, warnings), other = gang.run(train_on_a_full_disk, words, str(ballast), checked, world=2)
    assert (code, other) == (0, (0, ""))
    assert run.committed() == list(run.saved()) == [2, 6]
    assert damage(run.checkpoint(2)) == damage(run.checkpoint(6)) == {}
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4, 5, 6]
    (line,) = (line for line in warnings.splitlines() if "NOT SAVED" in line)
    assert line.startswith("step 4 is NOT SAVED: No space left on device")
    assert "newest checkpoint: step 2" in line
    assert [event["step"] for event in run.events.read() if event["event"] == "save"] == [2, 6]
