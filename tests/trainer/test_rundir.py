"""A run directory belongs to one run, and to one start of it at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from tests.gang import Gang
from tests.runs import TINY, train_worker
from trainer.config import load_config
from trainer.rundir import RunDirectory, run_directory


def test_a_run_in_use_is_refused(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    arguments = [TINY, f"data.corpus={corpus}", f"run.dir={tmp_path}", "train.steps=1"]
    run = RunDirectory(tmp_path / "tiny")
    with run.in_use():
        assert gang.run(train_worker, arguments, world=1) == [2]
        assert not run.metrics_file.exists()
    assert gang.run(train_worker, arguments, world=1) == [0]


def test_other_numbers_are_refused_and_layouts_are_not(tmp_path: Path) -> None:
    keys = [f"run.dir={tmp_path}", "data.corpus=texts"]
    run_directory(load_config(TINY, keys)).write_config(load_config(TINY, keys))
    for allowed in (
        "parallel.engine=ddp",
        "train.micro_batch_size=1",
        "train.activation_checkpointing=full train.activation_checkpointing_every=2",
        "train.steps=7",
        "log.every=3",
    ):
        config = load_config(TINY, [*keys, *allowed.split()])
        run_directory(config).check_config(config)
    for refused in (
        "optim.lr=0.5",
        "train.global_batch_size=16",
        "run.seed=1",
        "train.precision=bf16",
        "data.seq_len=8",
    ):
        config = load_config(TINY, [*keys, refused])
        with pytest.raises(UserError, match=f"'{refused.split('=')[0]}' is"):
            run_directory(config).check_config(config)


def test_a_config_from_before_a_key_existed_is_still_the_same_run(tmp_path: Path) -> None:
    config = load_config(TINY, [f"run.dir={tmp_path}"])
    run = run_directory(config)
    run.write_config(config)
    text = run.config_file.read_text()
    assert "nesterov: null" in text
    run.config_file.write_text(text.replace("  nesterov: null\n", ""))
    run.check_config(config)


def test_only_folders_of_steps_are_checkpoints(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for name in ("step_00000003", "step_00000004.damaged", "step_7", "step_x", "step_00000009"):
        (run.checkpoints / name).mkdir(parents=True)
        if name != "step_00000009":
            (run.checkpoints / name / "COMMIT").touch()
    assert run.committed() == [3]
    assert list(run.saved()) == [3, 9]
    assert run.damaged() == [run.checkpoints / "step_00000004.damaged"]


def test_what_is_put_aside_is_kept_beside_others(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    names = []
    for content in "ab":
        run.checkpoint(5).mkdir(parents=True)
        (run.checkpoint(5) / "COMMIT").write_text(content)
        names.append(run.put_aside(5))
    assert [name.name for name in names] == ["step_00000005.damaged", "step_00000005.damaged-2"]
    assert [(name / "COMMIT").read_text() for name in names] == ["a", "b"]
    assert run.committed() == []
    assert run.damaged() == names
