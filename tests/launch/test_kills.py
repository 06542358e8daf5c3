"""Whatever process dies, the run goes on from a whole checkpoint and ends with the same bits."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gang import Gang
from tests.killing import BY_TORCHRUN, KEYS, STEPS, Launched, assert_ended_alike
from tests.runs import TINY, train_worker
from trainer.outcome import read_outcome
from trainer.rundir import RunDirectory

HANG = 5.0  # seconds at one place


@pytest.fixture(scope="module")
def unbroken(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("unbroken")
    words = [TINY, f"data.corpus={corpus}", f"run.dir={folder}", *KEYS]
    assert gang.run(train_worker, words, world=2) == [0, 0]
    return RunDirectory(folder / "tiny")


@pytest.fixture(scope="module")
def survivor(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A run that ended although one rank was killed, then both, one stopped, and then the launcher killed.

    At random instants after a checkpoint; kills at any other instant are in tests/verify/test_kills.py.
    """
    launched = Launched(corpus, tmp_path_factory.mktemp("killed"), "killed", f"train.hang_minutes={HANG / 60}").start()
    try:
        generator = random.Random(3)
        for whom in ("rank", "ranks", "stop", "launcher"):
            before = launched.committed()
            assert launched.until(lambda before=before: launched.committed() > before), launched.output  # type: ignore[misc]
            time.sleep(generator.uniform(0.0, 0.3))
            if whom == "stop":
                os.kill(launched.workers()[1], signal.SIGSTOP)
                launched.stopped_at = time.time()
                assert launched.until(lambda: launched.events("hang")), launched.output
            else:
                assert launched.kill(whom, generator), launched.output
        assert read_outcome(launched.run) is None
        assert launched.start().process.wait(120) == 0, launched.output
        yield launched
    finally:
        launched.end()


def test_the_bits_are_those_of_a_run_that_nothing_happened_to(survivor: Launched, unbroken: RunDirectory) -> None:
    assert_ended_alike(survivor.run, unbroken)


def test_each_restart_takes_one_attempt(survivor: Launched) -> None:
    restarts = survivor.events("restart")
    assert [(event["attempt"], event["how"]) for event in restarts] == [(1, "SIGKILL"), (2, "SIGKILL"), (3, "hang")]
    assert [event["attempt"] for event in survivor.events("start")] == [0, 1, 2, 3, 0]
    assert "was ended by SIGKILL, perhaps because memory ran out" in survivor.output
    assert "gramian: restart 1 of 3, from step " in survivor.output
    assert "on the way    3 restarts, 1 hang; see " in survivor.output
    assert "left  (1 restart so far)\n" in survivor.output


def test_a_stopped_rank_is_named(survivor: Launched) -> None:
    """Within the limit of where rank 0 waits for it, and what a watch needs to look."""
    (hang,) = survivor.events("hang")
    in_a_save = "in save" in stacks_of(survivor)
    assert hang["time"] - survivor.stopped_at < HANG * (3 if in_a_save else 1) + 3
    assert "rank 1 gave no sign of life for " in hang["message"]
    assert re.search(r"last seen in (data|the step|the save), step \d+", hang["message"])
    assert "in _train" in stacks_of(survivor)
    assert list((survivor.run.logs / "hangs").glob("*-rank-0.json"))  # the collectives


def stacks_of(launched: Launched) -> str:
    """What the rank that was not stopped has left."""
    (stacks,) = (launched.run.logs / "hangs").glob("*.txt")
    assert "-rank-0.txt" in stacks.name
    return stacks.read_text()


@pytest.fixture
def under_torchrun(corpus: Path, tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(corpus, tmp_path, "killed", by=BY_TORCHRUN)
    yield launched.start()
    launched.end()


@pytest.mark.verify
def test_under_torchrun(under_torchrun: Launched) -> None:
    """It starts workers again after a death; and after a stop, to which it does the same, they leave at once."""
    launched = under_torchrun
    assert launched.until(launched.committed)
    assert launched.kill("rank", random.Random(0))
    before = launched.committed()
    assert launched.until(lambda: launched.committed() > before), launched.output
    os.kill(launched.workers()[1], signal.SIGTERM)
    assert launched.process.wait(120) == 1
    outcome = read_outcome(launched.run)
    assert outcome is not None
    assert (outcome["outcome"], outcome["exit_code"], outcome["attempt"]) == ("requeue", 75, 1)
    assert outcome["step"] == launched.committed() < STEPS
    assert [event["attempt"] for event in launched.events("start")] == [0, 1]
