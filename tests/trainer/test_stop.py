"""Told to stop: all ranks save at the same step and say "requeue me", wherever the signal finds them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.gang import Gang
from tests.runs import TINY, losses_and_norms, read_state, train_worker
from trainer.rundir import RunDirectory
from trainer.stop import STARTED, TimeLimit

STEPS, EVERY = 6, 4
# Where the signal comes: what is called there, in which of its calls, and the step that is saved.
PLACES = {
    "training": ("trainer.loop.train_step", 3, 2),
    "evaluation": ("trainer.evaluate.micro_batches", 1, 4),
    "the last evaluation": ("trainer.evaluate.micro_batches", 3, 6),
    "data set-up": ("trainer.loop.open_run_data", 1, None),
}


def _signalled(arguments: list[str], place: str, call: int, number: int) -> int:
    """In a rank: a worker; rank 1 gets a signal as it makes a certain call."""
    calls = 0

    def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # a thread reads it
        return function(*given)

    if os.environ["RANK"] != "1":
        return train_worker(arguments)
    module, name = place.rsplit(".", 1)
    __import__(module)
    function = getattr(sys.modules[module], name)
    with mock.patch(place, counted):
        return train_worker(arguments)


def _words(corpus: Path, folder: Path, *more: str) -> list[str]:
    steps = [f"train.steps={STEPS}", f"checkpoint.every={EVERY}", f"eval.every={EVERY}", "eval.batches=2"]
    return [TINY, f"data.corpus={corpus}", f"run.dir={folder}", *steps, *more]


@pytest.fixture(scope="module")
def unbroken(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("unbroken")
    assert gang.run(train_worker, _words(corpus, folder), world=2) == [0, 0]
    return RunDirectory(folder / "tiny")


@pytest.mark.parametrize("place", PLACES)
def test_one_rank_alone_is_told(gang: Gang, corpus: Path, tmp_path: Path, place: str, unbroken: RunDirectory) -> None:
    """Both leave with 75 and the same checkpoint, and the next start ends as if nothing had been, to the bit."""
    words = _words(corpus, tmp_path)
    function, call, step = PLACES[place]
    begin = time.monotonic()
    assert gang.run(_signalled, words, function, call, signal.SIGTERM, world=2) == [75, 75]
    assert time.monotonic() - begin < 30
    run = RunDirectory(tmp_path / "tiny")
    assert max(run.committed(), default=None) == step
    outcome = json.loads(run.outcome_file.read_text())
    assert (outcome["outcome"], outcome["exit_code"], outcome["step"]) == ("requeue", 75, step or 0)
    where = "no step was made yet" if step is None else f"saved at step {step}"
    assert outcome["reason"] == f"stopped by SIGTERM to rank 1: {where}; the same command goes on"
    told = [event for event in run.events.read() if event["event"] in ("signal", "stop")]
    assert [(event["event"], event.get("name"), event.get("ranks")) for event in told] == [
        ("signal", "SIGTERM", [1]),
        ("stop", None, None),
    ]
    assert gang.run(train_worker, words, world=2) == [0, 0]
    assert losses_and_norms(run) == losses_and_norms(unbroken)
    evaluations = ([row for row in each.read_metrics() if "eval_loss" in row] for each in (run, unbroken))
    assert next(evaluations) == next(evaluations)
    assert all(
        map(torch.equal, read_state(run.checkpoint(STEPS)).values(), read_state(unbroken.checkpoint(STEPS)).values())
    )
    assert json.loads(run.outcome_file.read_text())["outcome"] == "done"
    assert run.events.counts() == "1 stop"


_WAITS = """
import ctypes
from trainer.stop import heed_signals
with heed_signals() as stop:
    print("ready", flush=True)
    for _ in range(4):  # a call that a signal interrupts
        ctypes.CDLL(None).usleep(400_000)
    print(stop.reason)
"""


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGTERM, signal.SIGTERM], None),  # delivered twice
        ([signal.SIGTERM, signal.SIGUSR1], 128 + signal.SIGUSR1),
        ([signal.SIGUSR1, signal.SIGINT], 128 + signal.SIGINT),
    ],
)
def test_a_second_signal_ends_at_once(numbers: list[int], code: int | None) -> None:
    """Also where the main thread is in a call that runs no handler, as it is in a collective."""
    with subprocess.Popen(
        [sys.executable, "-c", _WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.1)
        out, error = process.communicate(timeout=20)
    assert process.returncode == (code or 0)
    assert out == ("SIGTERM\n" if code is None else "")
    assert ("ended at once" in error) == (code is not None)


def test_the_same_signal_well_after_the_first_ends_at_once() -> None:
    from trainer.stop import Repeats

    with mock.patch("trainer.stop.time.monotonic", side_effect=[100.0, 104.0, 106.0]):
        repeats = Repeats()
        assert [repeats.ends_at_once(signal.SIGTERM) for _ in range(3)] == [False, False, True]


def test_time_limit() -> None:
    """The nearer of both; early enough for a long step and a save, twice over; restarts do not begin it anew."""
    assert TimeLimit.of(None, {}, 0.0) is None
    limit = TimeLimit.of(1.0, {STARTED: "1000", "SLURM_JOB_END_TIME": "5000"}, 2000.0)
    assert limit is not None
    assert limit.reason == "train.max_hours"
    limit.save_seconds = 20.0
    times = {2010.0: False, 4400.0: False, 4410.0: False, 4540.0: False, 4565.0: True}
    # Of the long step from 2010 to 4400 alone nothing follows for its own end, but it would not be begun again.
    assert 4400 + 2 * (2390 + 20) > 4600
    for now, near in times.items():
        limit._step_seconds = 0.0
        limit._asked = now - 1
        with mock.patch("trainer.stop.time.time", return_value=now):
            assert limit.is_near() == near, now
    slurm = TimeLimit.of(10.0, {"SLURM_JOB_END_TIME": "5000"}, 2000.0)
    assert slurm is not None
    assert slurm.reason == "the end of the SLURM job"


def test_the_time_limit_stops_all_ranks(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """With what was made by then, on a busy machine perhaps nothing."""
    words = _words(corpus, tmp_path, "train.steps=100000", "train.max_hours=0.0008", "log.every=100", "eval.batches=0")
    assert gang.run(train_worker, words, world=2, timeout=60) == [75, 75]
    run = RunDirectory(tmp_path / "tiny")
    outcome = json.loads(run.outcome_file.read_text())
    step = max(run.committed(), default=0)
    assert outcome["step"] == step
    where = f"saved at step {step}" if step else "no step was made yet"
    assert outcome["reason"].startswith(f"stopped by train.max_hours: {where};")
