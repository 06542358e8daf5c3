"""Whatever process dies, the run goes on from a whole checkpoint and ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gang import Gang
from tests.killing import BY_GRAMIAN, BY_TORCHRUN, KEYS, STEPS, Launched, assert_ended_alike
from tests.runs import TINY, train_worker
from trainer.outcome import read_outcome
from trainer.rundir import RunDirectory


@pytest.fixture(scope="module")
def unbroken(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("unbroken")
    words = [TINY, f"data.corpus={corpus}", f"run.dir={folder}", *KEYS]
    assert gang.run(train_worker, words, world=2) == [0, 0]
    return RunDirectory(folder / "tiny")


@pytest.fixture
def launched(corpus: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launched]:
    by = getattr(request, "param", BY_GRAMIAN)
    launched = Launched(corpus, tmp_path, "killed", "train.hang_minutes=0.1", by=by)
    yield launched.start()
    launched.end()


@pytest.mark.timeout(300)
def test_a_rank_all_ranks_and_the_launcher_are_killed(launched: Launched, unbroken: RunDirectory) -> None:
    """At random instants of training; 20 kills, also at the start of processes, are in tests/verify/test_kills.py."""
    generator = random.Random(3)
    for whom in ("rank", "ranks", "launcher"):
        before = launched.committed()
        assert launched.until(lambda before=before: launched.committed() > before), launched.output  # type: ignore[misc]
        time.sleep(generator.uniform(0.0, 0.3))
        assert launched.kill(whom, generator), launched.output
    assert read_outcome(launched.run) is None
    assert launched.start().process.wait(120) == 0, launched.output
    assert_ended_alike(launched.run, unbroken)
    restarts = launched.events("restart")
    assert [(event["attempt"], event["how"]) for event in restarts] == [(1, "SIGKILL"), (2, "SIGKILL")]
    assert [event["attempt"] for event in launched.events("start")] == [0, 1, 2, 0]
    assert "was ended by SIGKILL, perhaps because memory ran out" in launched.output
    assert "gramian: restart 1 of 3, from step " in launched.output
    assert "on the way    2 restarts; see " in launched.output


@pytest.mark.timeout(300)
def test_a_stopped_rank_is_named_and_the_run_goes_on(launched: Launched, unbroken: RunDirectory) -> None:
    """Soon after the limit, of six seconds."""
    assert launched.until(launched.committed)
    os.kill(launched.workers()[1], signal.SIGSTOP)
    begin = time.monotonic()
    assert launched.until(lambda: launched.events("hang"), 30), launched.output
    assert time.monotonic() - begin < 6 + 3
    assert launched.process.wait(120) == 0, launched.output
    assert_ended_alike(launched.run, unbroken)
    (hang,) = launched.events("hang")
    assert "rank 1 gave no sign of life for " in hang["message"]
    assert "last seen in the step, step " in hang["message"] or "last seen in data, step " in hang["message"]
    assert [(event["rank"], event["how"]) for event in launched.events("restart")] == [(0, "hang")]
    (stacks,) = (launched.run.logs / "hangs").glob("*.txt")
    assert "-rank-0.txt" in stacks.name
    assert stacks.with_suffix(".json").exists()  # the collectives
    assert "in train_step" in stacks.read_text()
    assert STEPS in launched.run.committed()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launched", [BY_TORCHRUN], indirect=True, ids=["torchrun"])
def test_under_torchrun(launched: Launched) -> None:
    """It starts workers again after a death; and after a stop, to which it does the same, they leave at once."""
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
