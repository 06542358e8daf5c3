"""What is left to do of a sweep, in which order, and the records of what is done. Imports no torch."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import append_json_line, read_json_lines
from scaling.design import Cell, Trunk, trunks
from trainer.events import EventLog
from trainer.outcome import read_outcome
from trainer.rundir import RunDirectory


@dataclass(frozen=True)
class Task:
    """One start of a run: a cell to its end, or a trunk to the step at which cells branch off."""

    key: str
    base: Path
    words: tuple[str, ...]
    run: RunDirectory
    flops: float
    cell: Cell | None = None  # None: of a trunk
    after: str | None = None  # key of the task that must be done before


@dataclass(frozen=True)
class Result:
    """How a task ended."""

    task: Task
    code: int  # of the worker; 0: done
    reason: str = ""

    @property
    def diverged(self) -> bool:
        """Whether the run gave up over numbers that are not finite, as it would again."""
        return self.task.cell is not None and self.reason.startswith("CheckFailed: ")


@dataclass(frozen=True)
class SweepFolder:
    """`<dir>/<name>/`: runs, records, events, reports."""

    path: Path

    @property
    def records_file(self) -> Path:
        """One JSON object a cell that is done."""
        return self.path / "records.jsonl"

    @property
    def prediction_file(self) -> Path:
        """What was said of the largest budget before it was run."""
        return self.path / "prediction.json"

    def predictions(self) -> dict[str, dict[str, Any]]:
        """By cell: value and interval, or why there is none; variant, time, and how many records it is of."""
        file = self.prediction_file
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}

    @property
    def lock_file(self) -> Path:
        """Held by the `sweep run` that is going on."""
        return self.path / ".lock"

    @property
    def events(self) -> EventLog:
        """Starts and failures."""
        return EventLog(self.path / "events.jsonl")

    def run_of(self, name: str) -> RunDirectory:
        """The directory of a cell's or trunk's run."""
        return RunDirectory(self.path / "runs" / name)

    def records(self) -> dict[str, dict[str, Any]]:
        """Of each cell that is done, by its id."""
        return {record["cell"]: record for record in read_json_lines(self.records_file)}

    def append(self, record: dict[str, Any]) -> None:
        """Add a record."""
        append_json_line(self.records_file, record)


def plan_tasks(folder: SweepFolder, cells: list[Cell], wanted: Iterable[Cell], share_prefix: bool) -> list[Task]:
    """Tasks for the wanted cells that have no record.

    Args:
        cells: all of the sweep, of which trunks follow.
    """
    done = folder.records()
    left = {cell.id: cell for cell in wanted if cell.id not in done}
    tasks: list[Task] = []
    for trunk in trunks(cells) if share_prefix else []:
        for task in _of_trunk(folder, trunk, left):
            tasks.append(task)
            if task.cell is not None:
                del left[task.cell.id]
    for cell in left.values():
        tasks.append(Task(cell.name, cell.base, cell.words, folder.run_of(cell.name), cell.flops["causal"], cell))
    return tasks


def _of_trunk(folder: SweepFolder, trunk: Trunk, left: dict[str, Cell]) -> list[Task]:
    """The pieces of a trunk that are missing, and the cells that branch off.

    A cell whose place the trunk has passed without a checkpoint there, since it is new, is made from its beginning.
    """
    run, tasks, before = folder.run_of(trunk.name), [], None
    committed = run.committed()
    for cell in trunk.cells:
        step = cell.decay_start
        if cell.id not in left or step is None:
            continue
        per_step = cell.flops["causal"] / cell.config.train.steps
        key = f"{trunk.name}@{step}"
        if step not in committed and key != before:
            if committed and committed[-1] > step:
                continue
            first = max([0, *committed, *([int(before.rpartition("@")[2])] if before else [])])
            words = (*trunk.words, f"train.steps={step}")
            tasks.append(Task(key, trunk.base, words, run, per_step * (step - first), after=before))
            before = key
        words = (*cell.words, f"checkpoint.resume={json.dumps(str(run.checkpoint(step)))}")
        rest = per_step * (cell.config.train.steps - step)
        after = key if step not in committed else None
        tasks.append(Task(cell.name, cell.base, words, folder.run_of(cell.name), rest, cell, after))
    return tasks


def record_of(cell: Cell, run: RunDirectory, diverged: bool) -> dict[str, Any]:
    """All that a fit needs of a run, from its directory; without a loss where it diverged."""
    rows = run.read_metrics()
    trained = [row for row in rows if "loss" in row]
    losses = [row["eval_loss"] for row in rows if row["step"] == cell.config.train.steps and "eval_loss" in row]
    seconds = sum(row["seconds"] for row in trained)
    config = cell.config
    first = trained[0]["step"] - config.log.every if trained else 0  # a branch begins where its trunk ended
    share = (config.train.steps - max(0, first)) / config.train.steps
    return {
        "cell": cell.id,
        "name": cell.name,
        "variant": cell.variant,
        "budget": cell.budget,
        "group": f"{cell.variant} w{cell.width} seed {config.run.seed}",
        "width": cell.width,
        "params": cell.params,
        "tokens": cell.tokens,
        "flops": cell.flops,
        "loss": None if diverged or not losses else losses[-1],
        "train_loss": trained[-1]["loss"] if trained else None,
        "lr": config.optim.lr,
        "batch": config.train.global_batch_size * config.data.seq_len,
        "steps": config.train.steps,
        "seed": config.run.seed,
        "flops_per_second": cell.flops["causal"] * share / seconds if seconds > 0 else None,
        "seconds": seconds,
        "time": round(time.time(), 3),
        "command": shlex.join(["gramian", "train", str(cell.base), *cell.words]),
    }


def reason_of(run: RunDirectory, log: Path | None) -> str:
    """Why a start failed: as its outcome says, or the last line of the worker's log."""
    outcome = read_outcome(run)
    if outcome is not None and outcome["outcome"] != "done":
        return str(outcome["reason"])
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log is not None and log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "no reason was left")
