"""The log of events."""

from __future__ import annotations

from pathlib import Path

from trainer.events import EventLog


def test_events_are_added_and_read_back(tmp_path: Path) -> None:
    """By any process, in order; a last line that was cut off is left out; without a folder one is made."""
    path = tmp_path / "run" / "events.jsonl"
    assert EventLog(path).read() == []
    EventLog(path).record("start", step=0)
    EventLog(path).record("save", step=5, seconds=0.5)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"time": 1.0, "ev')
    events = EventLog(path).read()
    assert [event["event"] for event in events] == ["start", "save"]
    assert events[1]["step"] == 5
    assert events[1]["time"] >= events[0]["time"] > 1e9
    EventLog(path).record("stop")
    assert [event["event"] for event in EventLog(path).read()] == ["start", "save", "stop"]


def test_counts(tmp_path: Path) -> None:
    """Of what people ask for; nothing where nothing went wrong."""
    log = EventLog(tmp_path / "events.jsonl")
    log.record("start", attempt=0)
    log.record("save", seconds=2.0)
    assert log.counts() == ""
    for event in ("restart", "restart", "stop", "skip"):
        log.record(event)
    assert log.counts() == "2 restarts, 1 stop, 1 skipped step"
    assert log.seconds_of("save") == [2.0]


def test_what_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    """As on a full disk."""
    (tmp_path / "file").write_text("")
    EventLog(tmp_path / "file" / "events.jsonl").record("start")
    assert EventLog(tmp_path / "file" / "events.jsonl").read() == []
