"""The watch over ranks: who is to blame, and how a process that hangs ends. Ranks that are stopped: tests/launch."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.pulse import Pulse, whose_fault


def _beat(place: str, step: int, waits: bool = False, age: float = 0.0, host: str = "a") -> dict[str, Any]:
    return {"place": place, "step": step, "seconds": 12.0, "waits": waits, "age": age, "host": host}


STEP_7 = _beat("the step", 7)


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ([STEP_7, _beat("data", 7), STEP_7], "rank 1 did not come on from data, step 7, where it is for 12 s"),
        ([_beat("data", 7), STEP_7, STEP_7], "rank 0 did not come on from data, step 7, where it is for 12 s"),
        ([STEP_7, _beat("the save", 6), STEP_7], "rank 1 did not come on from the save, step 6, where it is for 12 s"),
        # One that waits for the others is further than one that does not.
        (
            [_beat("evaluation", 4, waits=True), _beat("evaluation", 4)],
            "rank 1 did not come on from evaluation, step 4",
        ),
        # One that is silent is to blame, wherever it was.
        ([STEP_7, STEP_7, _beat("the save", 7, age=9.0)], "rank 2 gave no sign of life for "),
        ([_beat("set-up", 0), None], "rank 1 was never seen"),
        ([STEP_7, _beat("data", 7, host="b")], "rank 1 on b did not come on from data, step 7, where it is for 12 s"),
        ([STEP_7, _beat("data", 7, age=9.0, host="b")], "rank 1 on b gave no sign of life for "),
        ([STEP_7, STEP_7], "all ranks are in the step, step 7, for 12 s"),
        ([_beat("the save", 3)], "rank 0 did not come on from the save, step 3, where it is for 12 s"),
    ],
)
def test_whose_fault(beats: list[dict[str, Any] | None], expected: str) -> None:
    now = time.time()
    seen = {rank: {**beat, "time": now - beat["age"]} for rank, beat in enumerate(beats) if beat is not None}
    assert whose_fault(seen, rank=0, world_size=len(beats), silence=4.0).startswith(expected)


def test_places_have_their_limits() -> None:
    """The first time at a place may be long, set-up and saves always; the data's set-up may take what it takes."""
    pulse = Pulse()
    limits = [pulse.limit]
    for place in ("set-up", "data", "the step", "data", "the step", "the save", "data", "the save"):
        pulse.at(place)
        limits.append(pulse.limit)
    assert limits == [float("inf"), 3, 3, 3, 1, 1, 3, 1, 3]


def test_own_time_is_without_waiting() -> None:
    pulse = Pulse()
    pulse.own_seconds()
    with pulse.waiting():
        assert pulse.beat()["waits"]
        time.sleep(0.2)
    time.sleep(0.05)
    assert 0.04 < pulse.own_seconds() < 0.19
    assert not pulse.beat()["waits"]


_HANGS = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from trainer.pulse import Pulse, watching

def stuck():
    time.sleep(60)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
pulse = Pulse()
with watching(pulse, 0, 1, 0.3 / 60, Path(sys.argv[1]), lambda message, step: print(message, step, flush=True)):
    for _ in range(2):
        pulse.at("data", 3)
    time.sleep(0.15)
    pulse.at("data", 4)  # a step begins: it was not stuck
    time.sleep(0.15)
    pulse.at("data", 5)
    print("going on", flush=True)
    stuck()
"""


def test_a_process_that_hangs_ends(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", _HANGS, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 70, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "going on"
    assert second.startswith("no progress: rank 0 did not come on from data, step 5, where it is for ")
    assert second.endswith(f" s; stacks are in {tmp_path} 5")
    (stacks,) = tmp_path.glob("*.txt")
    assert "in stuck" in stacks.read_text()
    assert time.monotonic() - begin < 50
