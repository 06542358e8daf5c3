"""How far a long job is: a bar on a terminal, a line now and then elsewhere, or nothing."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from common.logs import get_logger

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Reports on standard error (`bar`), through the logger (`lines`), or not at all (`none`).

    `total_bytes` of input may be 0, where nobody knows.
    """

    def __init__(self, how: Literal["bar", "lines", "none"], total_bytes: int) -> None:
        self._how, self._total = how, total_bytes
        self._started = self._told = time.monotonic()
        self._bar = Bar(
            TextColumn("encoding"),
            BarColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=how != "bar",
        )
        self._task = self._bar.add_task("encoding", total=total_bytes or None, rates="")

    def __enter__(self) -> Progress:
        self._started = self._told = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._total:
            self._bar.update(self._task, completed=self._total)
        self._bar.stop()

    def update(self, input_bytes: int, documents: int, tokens: int, text_bytes: int) -> None:
        """Tell how much of the input is read, and what has been encoded since the beginning of the `with` block."""
        now = time.monotonic()
        seconds = max(now - self._started, 1e-9)
        rates = f"{text_bytes / seconds / 1e6:.1f} MB/s, {tokens / seconds:,.0f} tokens/s"
        if self._how == "bar":
            self._bar.update(self._task, completed=min(input_bytes, self._total or input_bytes), rates=rates)
        elif self._how == "lines" and now - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            share = f"{min(input_bytes / self._total, 1.0):.0%}: " if self._total else ""
            get_logger().info("%s%s documents, %s tokens, %s", share, f"{documents:,}", f"{tokens:,}", rates)
