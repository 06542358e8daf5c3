"""What a run reports: rows of metrics.jsonl, and a live line (or plain lines) for people."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from trainer.rundir import RunDirectory


class Reporter:
    """Writes rows on rank 0 and shows them; on other ranks every call does nothing."""

    def __init__(self, run: RunDirectory, active: bool, first_step: int, total_steps: int) -> None:
        self._active, self._events = active, run.events
        self._first = first_step
        self._total = total_steps
        self._begin = time.perf_counter()
        self._console = Console(file=sys.stdout, highlight=False)
        self._progress: Progress | None = None
        counts = run.events.counts() if active else ""
        self._before = f"  ({counts} so far)" if counts else ""
        if not active:
            return
        run.path.mkdir(parents=True, exist_ok=True)
        self._file = open(run.metrics_file, "ab", buffering=0)  # noqa: SIM115 - closed in __exit__
        self._unwritten = b""  # what a full disk did not take
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[line]}"),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=first_step, line="")

    def __enter__(self) -> Reporter:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._active:
            self._write(b"")
            self._file.close()

    def say(self, text: str) -> None:
        """Print a line above the live line."""
        if self._active:
            self._console.print(text, markup=False, soft_wrap=True)

    def event(self, event: str, text: str, **fields: Any) -> None:
        """Print a line, and add the event to the run's log of events."""
        self.say(text)
        if self._active:
            self._events.record(event, **fields)

    def row(self, row: dict[str, Any]) -> None:
        """Append a row and show it; it is on disk when this returns, but for a power cut."""
        if not self._active:
            return
        self._write(json.dumps(row).encode() + b"\n")
        if "spectra" in row:
            return  # too much for people
        if "eval_loss" in row:
            self.say(
                f"step {row['step']:>6}  held-out loss {row['eval_loss']:.4f} nats per token, "
                f"{row['eval_bits_per_byte']:.4f} bits per byte"
            )
            return
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
        norm = "overflow, update skipped" if row["grad_norm"] is None else f"{row['grad_norm']:.3f}"
        line = (
            f"loss {loss}  grad norm {norm}  lr {row['lr']:.2e}  "
            f"{row['tokens_per_second']:,.0f} tokens/s  MFU {row['mfu']:.1%}  {self._left(row['step'])} left"
            f"{self._before}"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], line=line)
        else:
            self.say(f"step {row['step']:>6}/{self._total}  {line}")

    def _write(self, line: bytes) -> None:
        """Append to the file; where the disk takes no more, keep the line for when it does, and train on."""
        told, self._unwritten = bool(self._unwritten), self._unwritten + line
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not told:
                self.say(f"metrics.jsonl cannot be written: {error.strerror}; its rows follow when it can")

    def _left(self, step: int) -> str:
        done = step - self._first
        seconds = (time.perf_counter() - self._begin) / max(1, done) * (self._total - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
