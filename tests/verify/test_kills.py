"""Twenty kills of workers and five of the launcher at random instants, start-up and saves included."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.killing import KEYS, STEPS, Launched, assert_ended_alike
from tests.runs import losses_and_norms
from tests.verify.evidence import write_evidence

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3600)]

ELASTIC, OF_LAUNCHERS = 20, 5
COMMAND = "pytest -m verify tests/verify/test_kills.py"


def test_whoever_is_killed(corpus: Path, tmp_path: Path) -> None:
    """The run goes on by itself from a whole checkpoint, and ends with the bits of one that was not killed."""
    unbroken = Launched(corpus, tmp_path, "unbroken").start()
    assert unbroken.until(unbroken.workers, 600)
    begin = time.monotonic()
    assert unbroken.process.wait(600) == 0, unbroken.output
    seconds = time.monotonic() - begin
    generator = random.Random(0)
    left = ["rank"] * (ELASTIC // 2) + ["ranks"] * (ELASTIC // 2) + ["launcher"] * OF_LAUNCHERS
    generator.shuffle(left)
    kills: list[dict[str, Any]] = []
    runs, restarts, elastic = 0, 0, 0
    while left:
        launched = Launched(corpus, tmp_path, f"killed-{runs}", "launch.max_restarts=20").start()
        here = _killed(launched, left, kills, seconds, generator)
        assert launched.process.wait(600) == 0, launched.output
        assert_ended_alike(launched.run, unbroken.run)
        assert len(launched.events("restart")) == here
        elastic, restarts, runs = elastic + here, restarts + len(launched.events("restart")), runs + 1
    assert elastic == restarts == ELASTIC
    assert len(losses_and_norms(unbroken.run)) == STEPS
    figures = {
        "keys": list(KEYS),
        "kills": kills,
        "runs": runs,
        "elastic_kills": elastic,
        "elastic_restarts": restarts,
        "starts_after_kills_of_the_launcher": OF_LAUNCHERS,
        "bits_that_differ": 0,
    }
    write_evidence("kills", COMMAND, figures)


def _killed(
    launched: Launched, left: list[str], kills: list[dict[str, Any]], seconds: float, generator: random.Random
) -> int:
    """Kill until nothing is left to kill, or the run has come to its end; how often it was workers.

    Every other kill waits for a checkpoint, so that not all fall on the start.
    """
    elastic = 0
    while left and launched.until(launched.workers, 600):
        saved = launched.committed()
        if len(kills) % 2:
            launched.until(lambda saved=saved: launched.committed() > saved, 600)  # type: ignore[misc]
            time.sleep(generator.uniform(0.0, 0.2 * seconds))
        else:
            time.sleep(generator.uniform(0.0, 0.95 * seconds))
        saved = launched.committed()
        if not launched.kill(left[-1], generator):
            break
        kills.append({"whom": left.pop(), "run": launched.run.path.name, "newest_checkpoint": saved})
        if kills[-1]["whom"] == "launcher":
            launched.start()
        else:
            elastic += 1
            launched.until(lambda expected=elastic: len(launched.events("restart")) >= expected)  # type: ignore[misc]
    return elastic
