"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path

from trainer.manifest import commit, fingerprint
from trainer.retention import prune
from trainer.rundir import RunDirectory


def saved(run: RunDirectory, step: int, committed: bool = True) -> Path:
    """A checkpoint of one file."""
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "file").write_text("content")
    if committed:
        commit(folder, {"file": fingerprint(folder / "file")})
    return folder


def left(run: RunDirectory) -> list[int]:
    """Steps of all folders that are there."""
    return list(run.saved())


def test_the_newest_committed_and_what_may_be_a_running_save_stay(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (1, 2, 3, 4, 5):
        saved(run, step, committed=step not in (2, 5))
    prune(run, keep=2, keep_every=0)
    assert left(run) == [3, 4, 5]  # 2 was torn and is older than the newest committed


def test_permanent_ones_stay(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in range(1, 10):
        saved(run, step, committed=step != 8)
    prune(run, keep=2, keep_every=4)
    assert left(run) == [4, 7, 9]  # 8 is torn: a step that is to stay is no reason


def test_a_cut_off_one_is_not_counted(tmp_path: Path) -> None:
    """With two to keep, damage of the second newest costs no good one; the newest whole one is never removed."""
    run = RunDirectory(tmp_path)
    for step in (1, 2, 3, 4):
        saved(run, step)
    (run.checkpoint(3) / "file").write_text("cont")
    prune(run, keep=2, keep_every=0)
    assert left(run) == [2, 3, 4]
    for step in (2, 4):
        (run.checkpoint(step) / "COMMIT").write_text("")
    prune(run, keep=1, keep_every=0)
    assert left(run) == [2, 3, 4]  # none is whole, so that none is too many


def test_nothing_is_removed_before_the_first_commit(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    saved(run, 1, committed=False)
    (run.checkpoints / "step_00000000.damaged").mkdir()
    prune(run, keep=1, keep_every=0)
    saved(run, 2)
    prune(run, keep=1, keep_every=0)
    assert left(run) == [2]
    assert len(run.damaged()) == 1
