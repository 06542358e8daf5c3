"""`gramian sweep status`: where each run of a sweep is."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launch.reports import align_right, check_writable, report_console, write_json
from launch.sweep_tasks import SweepFolder
from scaling.design import Cell, design, trunks
from scaling.sweepfile import load_sweep


def run_status(path: Path, watch: float | None, json_file: str | None) -> None:
    """Print the table, once or until all is done."""
    check_writable("--json", json_file)
    sweep = load_sweep(path)
    cells, folder = design(sweep), SweepFolder(sweep.folder)
    rows = states(folder, cells)
    write_json(json_file, {"runs": rows})
    if json_file == "-":
        return
    console = report_console()
    if watch is None:
        console.print(_table(rows))
        return
    with Live(_table(rows), console=console, auto_refresh=False) as live:
        while any(row["state"] in ("planned", "running") for row in rows):
            time.sleep(watch)
            rows = states(folder, cells)
            live.update(_table(rows), refresh=True)


def states(folder: SweepFolder, cells: list[Cell]) -> list[dict[str, Any]]:
    """Name, state, step and loss of every cell, and of trunks that are being trained."""
    records, last = folder.records(), {}
    for event in folder.events.read():
        last[event["run"].partition("@")[0]] = event
    rows = []
    for cell in cells:
        record = records.get(cell.id)
        row = {"run": cell.name, "steps": cell.config.train.steps, "step": 0, "loss": None, "reason": ""}
        if record is not None:
            state, row["loss"], row["step"] = (
                ("done" if record["loss"] is not None else "diverged"),
                record["loss"],
                cell.config.train.steps,
            )
        else:
            state, row["reason"] = _state(last.get(cell.name))
            row["step"] = _step(folder, cell.name)
        rows.append({**row, "state": state})
    for trunk in trunks(cells):
        if _state(last.get(trunk.name))[0] == "running" and any(c.id not in records for c in trunk.cells):
            steps = max(cell.decay_start or 0 for cell in trunk.cells)
            step = _step(folder, trunk.name)
            if step < steps:
                rows.append(
                    {"run": trunk.name, "steps": steps, "step": step, "loss": None, "reason": "", "state": "running"}
                )
    return rows


def _state(event: dict[str, Any] | None) -> tuple[str, str]:
    """Of a run without a record, from its last event."""
    if event is None:
        return "planned", ""
    if event["event"] == "failed":
        return "failed", event["reason"]
    try:
        os.kill(event.get("pid", -1) if event["event"] == "start" else os.getpid(), 0)
    except (OSError, OverflowError):
        return "planned", ""  # the command that started it is gone
    return "running", ""


def _step(folder: SweepFolder, name: str) -> int:
    rows = folder.run_of(name).read_metrics()
    return int(rows[-1]["step"]) if rows else 0


def _table(rows: list[dict[str, Any]]) -> Group:
    table = Table("run", "state", "step", "of", "loss", "reason")
    align_right(table, 2, 3, 4)
    for row in rows:
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        table.add_row(row["run"], row["state"], f"{row['step']:,}", f"{row['steps']:,}", loss, Text(row["reason"]))
    counts = Counter(row["state"] for row in rows)
    return Group(table, Text(", ".join(f"{n} {state}" for state, n in counts.items())))
