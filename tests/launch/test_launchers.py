"""One config, started by torchrun, `deepspeed`, `accelerate launch` and `gramian train`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gang import Gang
from tests.runs import TINY, train_worker
from trainer.rundir import RunDirectory

ROOT = Path(TINY).parent.parent
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "gramian": "gramian train --nproc 2",
    "torchrun": "torchrun --nproc-per-node 2 -m launch.worker",
    "deepspeed": "deepspeed --num_accelerators 2 --module launch.worker",
    "accelerate": "accelerate launch --num_processes 2 --use_deepspeed --zero_stage 2 -m launch.worker",
}


def words_of(corpus: Path, folder: Path, name: str) -> list[str]:
    words = [f"data.corpus={corpus}", f"run.dir={folder}", f"run.name={name}", "train.steps=5", "eval.batches=0"]
    return [*words, "train.sample_prompt=null", "parallel.engine=deepspeed", "train.global_batch_size=16"]


def start(launcher: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    program, *arguments = LAUNCHERS[launcher].split()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = os.pathsep.join([str(BIN), os.environ["PATH"]])
    command = [str(BIN / program), *arguments, TINY, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("gramian", marks=pytest.mark.verify),
        pytest.param("torchrun", marks=pytest.mark.verify),
        "deepspeed",
        "accelerate",
    ],
)
def test_the_same_losses(launcher: str, gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """The first five losses are those of ranks that no launcher started, digit for digit."""
    assert gang.run(train_worker, [TINY, *words_of(corpus, tmp_path, "here")], world=2) == [0, 0]
    done = start(launcher, words_of(corpus, tmp_path, launcher))
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (RunDirectory(tmp_path / name).read_metrics() for name in ("here", launcher))
    assert len(ours) == 5
    assert [row["loss"] for row in theirs] == [row["loss"] for row in ours]
    assert done.stdout.count("step      5/5") == 1


def test_an_accelerate_that_says_otherwise(corpus: Path, tmp_path: Path) -> None:
    """One line, from the worker, that names both."""
    words = [*words_of(corpus, tmp_path, "other"), "parallel.zero_stage=3"]
    done = start("accelerate", words)
    assert done.returncode != 0
    assert "accelerate was started with deepspeed_zero_stage 2, but 'parallel.zero_stage' is 3" in done.stderr
