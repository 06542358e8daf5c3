"""Ranks that are slower than the others are told, once, and only if they stay so."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gang import Gang
from tests.runs import TINY, train_worker
from trainer.events import EventLog
from trainer.stragglers import OwnTimes


def _told(tmp_path: Path, times: list[list[float]]) -> list[str]:
    own, events, lines = OwnTimes(), EventLog(tmp_path / "events.jsonl"), []
    for step, seconds in enumerate(times):
        own.add(seconds)
        if line := own.told(events, step):
            lines.append(line)
    return lines


def test_who_is_told_of(tmp_path: Path) -> None:
    even, slow = [0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.1]
    assert _told(tmp_path, [[9.0, 0.1, 0.1, 0.1]] + 200 * [even]) == []  # set-up does not count
    assert _told(tmp_path, 10 * ([slow] + 20 * [even])) == []  # now and then
    assert _told(tmp_path, 200 * [[0.001, 0.001, 0.01, 0.001]]) == []  # next to nothing
    assert _told(tmp_path, 300 * [[0.1, 0.12, 0.12, 0.1]]) == []
    (line,) = _told(tmp_path, 300 * [slow])
    assert line == "rank 2 is slow: it takes 0.20 s a step without waiting for the others, and these 0.10 s"
    assert len(_told(tmp_path, 100 * [slow] + 100 * [even] + 100 * [slow])) == 2
    assert len(_told(tmp_path, 100 * [[0.1, 0.3]])) == 1  # of two
    events = EventLog(tmp_path / "events.jsonl").read()
    assert [event["rank"] for event in events] == [2, 2, 2, 1]


def _slow_data(arguments: list[str]) -> int:
    """In a rank: a worker; the batches of rank 1 take long."""
    from data.prefetch import Prefetched

    train = Prefetched.train

    def slow(self: Any, *given: Any) -> Any:
        time.sleep(0.3 * (os.environ["RANK"] == "1"))
        return train(self, *given)

    soon = mock.patch.multiple("trainer.stragglers", _STEPS=3, _SMOOTHING=0.5)
    with mock.patch.object(Prefetched, "train", slow), soon:
        return train_worker(arguments)


def test_a_slow_rank_of_a_run_is_told(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    words = [TINY, f"data.corpus={corpus}", f"run.dir={tmp_path}", "train.steps=8", "eval.batches=0"]
    small = ["train.global_batch_size=4", "train.micro_batch_size=2"]
    assert gang.run(_slow_data, [*words, *small], world=2) == [0, 0]
    events = map(json.loads, (tmp_path / "tiny" / "events.jsonl").read_text().splitlines())
    (told,) = [event for event in events if event["event"] == "straggler"]
    assert told["rank"] == 1
    assert told["seconds"] > told["others"] + 0.2
