"""Two hundred flipped bits, and a start of the run after each."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.gang import Gang
from tests.runs import TINY, losses_and_norms, train_worker
from tests.trainer.test_damage import FLIPS, flip
from tests.verify.evidence import write_evidence
from trainer.rundir import RunDirectory

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3_600)]


def test_no_flipped_bit_is_loaded(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """Each start names the file, takes the checkpoint before, and ends with the numbers of the run without damage."""
    words = [TINY, f"data.corpus={corpus}", "eval.batches=0", "checkpoint.every=2", "checkpoint.keep=9"]

    def start(folder: Path, steps: int) -> RunDirectory:
        assert gang.run(train_worker, [*words, f"run.dir={folder}", f"train.steps={steps}"], world=2) == [0, 0]
        return RunDirectory(folder / "tiny")

    stopped, unbroken = start(tmp_path / "stopped", 4), start(tmp_path / "unbroken", 5)
    generator, flips = random.Random(1), Counter[str]()
    names = sorted(path.name for path in stopped.checkpoint(4).iterdir())
    for number in range(FLIPS):
        folder = tmp_path / "again"
        run = RunDirectory(Path(shutil.copytree(stopped.path, folder / "tiny")))
        file = run.checkpoint(4) / names[number % len(names)]
        flip(file, generator.randrange(8 * file.stat().st_size))
        start(folder, 5)
        events = [event for event in run.events.read() if event["event"] in ("damaged", "resume")]
        assert [(event["event"], event["step"]) for event in events] == [("damaged", 4), ("resume", 2)]
        assert list(events[0]["files"]) == [file.name]
        assert losses_and_norms(run) == losses_and_norms(unbroken)
        flips[file.name] += 1
        shutil.rmtree(folder)
    command = "python -m pytest -m verify tests/verify/test_checkpoint_damage.py"
    figures = {"flipped_bits": FLIPS, "by_file": dict(flips), "loaded": 0, "named_and_passed_over": FLIPS}
    write_evidence("checkpoint-damage", command, figures)
