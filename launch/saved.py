"""`gramian checkpoint list` and `gramian checkpoint verify`: what a run has saved, and whether it is undamaged."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Table

from common.errors import CheckFailed, UserError
from common.machine import available_cores
from launch.reports import align_right, check_writable, reading_bar, report_console, write_json
from trainer.manifest import MANIFEST, bytes_of, damage, read_trainer_state, sizes_agree
from trainer.rundir import COMMIT, RunDirectory, find_checkpoint


def run_list(path: Path, json_file: str | None) -> None:
    """Print a table of all that a run has saved, also of what no start would take."""
    check_writable("--json", json_file)
    run = RunDirectory(path)
    if not run.checkpoints.is_dir():
        raise UserError(f"{path}: no run with checkpoints (no folder 'checkpoints' in it); name a run directory")
    folders = sorted([*run.saved().values(), *run.damaged()])
    metrics = run.read_metrics()
    rows = [row for folder in folders if (row := _row(folder, metrics)) is not None]
    write_json(json_file, {"run": str(path), "checkpoints": rows})
    if json_file == "-":
        return
    table = Table("step", "tokens", "loss", "held-out loss", "bytes", "written", "state")
    align_right(table, 0, 1, 2, 3, 4)
    for row in rows:
        losses = ["" if row[key] is None else f"{row[key]:.4f}" for key in ("loss", "eval_loss")]
        tokens = "" if row["tokens"] is None else f"{row['tokens']:,}"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
        table.add_row(f"{row['step']}", tokens, *losses, f"{row['bytes']:,}", when, row["state"])
    report_console().print(table)


def _row(folder: Path, metrics: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What is known of a checkpoint without reading its large files; None: a run that goes on has just removed it.

    Losses are the newest logged up to its step.
    """
    step = int(folder.name.removeprefix("step_").split(".")[0])
    if ".damaged" in folder.name:
        state = "damaged, put aside"
    elif not (folder / COMMIT).exists():
        state = "not committed"
    else:
        state = "committed" if sizes_agree(folder) else "damaged"
    logged = [row for row in metrics if row["step"] <= step]
    newest = {key: next((row[key] for row in reversed(logged) if key in row), None) for key in ("loss", "eval_loss")}
    try:
        return {
            "name": folder.name,
            "step": step,
            "tokens": read_trainer_state(folder)["tokens"] if state == "committed" else None,
            **newest,
            "bytes": bytes_of(folder),
            "time": round(folder.stat().st_mtime, 3),
            "state": state,
        }
    except (FileNotFoundError, UserError):
        if (folder / COMMIT).exists():
            raise
        return None


def run_verify(path: Path, workers: int | None, json_file: str | None) -> None:
    """Read every byte of a checkpoint, or of all of a run.

    Raises:
        CheckFailed: something is not as it was written.
    """
    check_writable("--json", json_file)
    if (path / MANIFEST).exists() or (path / COMMIT).exists():
        folders = [path]
    else:
        run = RunDirectory(path)
        folders = [run.checkpoint(step) for step in run.committed()] or [find_checkpoint(path)]
    size = sum(map(bytes_of, folders))
    with reading_bar() as bar:
        task = bar.add_task("reading", total=size)
        problems = [
            {"checkpoint": str(folder), "file": file, "what": what}
            for folder in folders
            for file, what in _damage(folder, workers or available_cores(), lambda n: bar.advance(task, n)).items()
            if folder == path or (folder / COMMIT).exists()  # or else a run that goes on has just removed it
        ]
    write_json(json_file, {"checkpoints": [str(folder) for folder in folders], "bytes": size, "problems": problems})
    if json_file != "-":
        for problem in problems:
            print(f"{problem['checkpoint']}/{problem['file']}: {problem['what']}")
    if problems:
        first, more = problems[0], f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckFailed(
            f"{first['checkpoint']}: damaged: {first['file']}{more}; bring it again from where a good copy is; a start "
            f"of the run puts it aside and goes on from the one before"
        )
    if json_file != "-":
        print(f"{path}: {len(folders)} checkpoint{'s' * (len(folders) != 1)}, {size:,} bytes: all as written")


def _damage(folder: Path, threads: int, tell: Callable[[int], None]) -> dict[str, str]:
    """All that is wrong with a checkpoint, by file."""
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(lambda part: damage(folder, part, threads, tell), range(threads))
        return {file: what for part in parts for file, what in sorted(part.items())}
