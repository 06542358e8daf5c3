"""What happened to a run, in `events.jsonl`: one JSON object a line, with `time` and `event`. Imports no torch.

Unlike metrics it is never cut back: what a restart does again was done twice, and is told twice.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common.files import append_json_line, read_json_lines

_TOLD = {"restart": "restart", "stop": "stop", "hang": "hang", "skip": "skipped step"}


class EventLog:
    """Appends events to a file; each is one write, so that workers and their launcher can share it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def record(self, event: str, **fields: Any) -> None:
        """Add an event with the time in seconds since 1970. A disk that takes no more ends no run."""
        with contextlib.suppress(OSError):
            append_json_line(self.path, {"time": round(time.time(), 3), "event": event, **fields})

    def counts(self) -> str:
        """How many restarts, stops, hangs and skipped steps there were, in words; empty without any."""
        events = Counter(event.get("event") for event in self.read())
        return ", ".join(f"{events[e]} {word}{'s' * (events[e] > 1)}" for e, word in _TOLD.items() if events[e])

    def seconds_of(self, event: str) -> list[float]:
        """How long each event of a kind took that says so."""
        return [entry["seconds"] for entry in self.read() if entry.get("event") == event and "seconds" in entry]

    def read(self) -> list[dict[str, Any]]:
        """All events, oldest first; a last line that a full disk cut off is left out."""
        return read_json_lines(self.path)
