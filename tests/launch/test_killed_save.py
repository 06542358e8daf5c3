"""A run that is killed in the middle of a save goes on from the one before."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults import patched_when_imported
from tests.gang import Gang
from tests.launch.commands import BIN, environment, tiny
from tests.runs import losses_and_norms, train_worker
from trainer.manifest import damage
from trainer.rundir import RunDirectory

# The save of step 4 writes half of its file and then stands.
_HALF_A_FILE = """
import os, time

def patch(shard):
    def write(self, folder, parts, whole=shard.Shard.write):
        entries = whole(self, folder, parts)
        if folder.name == "step_00000004":
            ((name, entry),) = entries.items()
            os.truncate(folder / name, entry["bytes"] // 2)
            time.sleep(1000)
        return entries
    shard.Shard.write = write
"""


@pytest.mark.timeout(200)
def test_killed_in_a_save(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """The torn one is ignored, the one before is taken, and a later save removes what is left."""
    patched_when_imported(tmp_path, "trainer.shard", _HALF_A_FILE)
    words = tiny(corpus, tmp_path / "runs", "checkpoint.every=2", "train.steps=6", "eval.batches=0")
    run = RunDirectory(tmp_path / "runs" / "tiny")
    torn = run.checkpoint(4) / "shard-00001-model-00001-of-00001.safetensors"
    with subprocess.Popen(
        [str(BIN / "gramian"), *words, "--nproc", "1"],
        env=environment(PYTHONPATH=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + 120
        # Training goes on to the last step while the save stands.
        while len(run.read_metrics()) < 6 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL, output
    before = losses_and_norms(run)
    assert len(before) == 6
    assert run.committed() == [2]
    assert torn.stat().st_size > 100_000
    assert list(damage(run.checkpoint(4))) == ["COMMIT"]
    keys = [*words[1:], "checkpoint.every=3", "checkpoint.keep=9"]  # no other save of step 4 takes its place
    assert gang.run(train_worker, keys, world=2) == [0, 0]
    resumed = [event for event in run.events.read() if event["event"] == "resume"]
    assert [event["step"] for event in resumed] == [2]
    assert run.committed() == list(run.saved()) == [2, 3, 6]
    assert len(losses_and_norms(run)) == 6
    assert losses_and_norms(run)[:2] == before[:2]
    for ours, theirs in zip(losses_and_norms(run), before, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
