"""`gramian slurm status` and `gramian slurm cancel`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.table import Table

from common.errors import UserError
from launch.reports import align_right, check_writable, report_console, write_json
from launch.slurm.control import SlurmError, answering, show_jobs, slurm, time_of
from launch.slurm.job import CANCEL
from launch.slurm.submit import submissions
from trainer.config import load_config
from trainer.outcome import read_outcome
from trainer.rundir import RunDirectory

_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "gone")


def run_status(run: Path, lines: int, json_file: str | None) -> None:
    """Show the newest job of a run, or of each run of an array, and the end of its log."""
    check_writable("--json", json_file)
    with answering():
        rows = statuses(run)
    write_json(json_file, {"runs": rows})
    if json_file == "-":
        return
    console = report_console()
    table = Table("run", "job", "state", "step", "loss", "restarts", "left", "came to")
    align_right(table, 3, 4, 5, 6)
    for row in rows:
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        state = row["state"] + (f" ({row['reason']})" if row["reason"] else "")
        steps = f"{row['step']}/{row['steps']}" if row["steps"] else str(row["step"])
        cells = (row["run"], row["job"], state, steps, loss, str(row["restarts"]), row["left"], row["outcome"] or "")
        table.add_row(*cells)
    console.print(table)
    for row in rows:
        if row["why"]:
            console.print(f"{row['run']}: {row['why']}", markup=False)
    shown = [row for row in rows if row["state"] not in _ENDED] or rows
    for row in shown[:3]:
        log = Path(row["log"])
        if lines and log.exists():
            console.print(f"\n{log}", markup=False)
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]:
                console.print(f"  {line}", markup=False)


def statuses(run: Path) -> list[dict[str, Any]]:
    """What there is to know of a run, or of each run of an array."""
    # A run's name: its folder, its newest job, the log, and what SLURM says of the job where that is known.
    elements: dict[str, tuple[Path, str, str, dict[str, str] | None]] = {}
    for _, record in submissions(run):
        if record["elements"]:
            asked = _elements_of(record["job"])
            for number, name in record["elements"].items():
                if not asked or number in asked or name not in elements:
                    job, log = f"{record['job']}_{number}", record["log"].replace("*", number)
                    elements[name] = (run.with_name(name), job, log, asked.get(number))
        else:
            elements[run.name] = (run, record["job"], record["log"], None)
    return [_status(name, *of) for name, of in elements.items()]


def _elements_of(job: str) -> dict[str, dict[str, str]]:
    """Records of the elements that a job has, by their numbers; none where SLURM has forgotten it."""
    found: dict[str, dict[str, str]] = {}
    for record in show_jobs(job):
        for part in record.get("ArrayTaskId", "").partition("%")[0].split(","):
            first, _, last = part.partition("-")
            if first.isdecimal():
                found |= {str(number): record for number in range(int(first), int(last or first) + 1)}
    return found


def _status(name: str, folder: Path, job: str, log: str, known: dict[str, str] | None) -> dict[str, Any]:
    run = RunDirectory(folder)
    record = job_record(job, known)
    rows = [row for row in run.read_metrics() if row.get("loss") is not None]
    outcome = read_outcome(run) if record["state"] in _ENDED or record["state"] == "PENDING" else None
    steps = load_config(run.config_file).train.steps if run.config_file.exists() else None
    return {
        "run": name,
        "job": job,
        "state": record["state"],
        "reason": record["reason"],
        "step": rows[-1]["step"] if rows else 0,
        "steps": steps,
        "loss": rows[-1]["loss"] if rows else None,
        "restarts": record["restarts"],
        "left": record["left"],
        "nodes": record["nodes"],
        "outcome": outcome and outcome["outcome"],
        "why": outcome["reason"] if outcome is not None and outcome["outcome"] not in ("done", "requeue") else None,
        "log": log,
    }


def job_record(job: str, known: dict[str, str] | None = None) -> dict[str, Any]:
    """State, reason, restarts and time left of a job: by scontrol, later by sacct where there is accounting.

    Args:
        known: what scontrol has said of it already.
    """
    for record in [known] if known is not None else show_jobs(job):
        reason = record.get("Reason", "None")
        return {
            "state": record["JobState"],
            "reason": "" if reason == "None" or not record["JobState"].startswith("PENDING") else reason,
            "restarts": int(record.get("Restarts", "0")),
            "left": _left(record) if record["JobState"] == "RUNNING" else "",
            "nodes": record.get("NodeList", ""),
        }
    try:
        state = slurm("sacct", "-n", "-X", "-P", "-j", job, "-o", "State").split()
    except (SlurmError, UserError):
        state = []
    return {"state": state[0] if state else "gone", "reason": "", "restarts": 0, "left": "", "nodes": ""}


def _left(record: dict[str, str]) -> str:
    try:
        seconds = max(0, int(time_of(record, "EndTime") - time.time()))
    except ValueError:
        return "no limit"
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def run_cancel(run: Path, now: bool) -> None:
    """End a run's jobs: those that run save first, unless `now`."""
    ended = 0
    for submission, record in submissions(run):
        with answering():
            states = _states(record["job"])
        for job, state in states.items():
            if state in _ENDED or state == "COMPLETING":
                continue
            (submission / f"{CANCEL}-{job}").touch()
            try:
                if state == "RUNNING" and not now:
                    slurm("scancel", "--signal=TERM", job)  # to the step; its end is then that of the job
                    print(f"job {job}: told to save and end")
                else:
                    slurm("scancel", job)
                    print(f"job {job}: cancelled")
            except SlurmError as error:
                raise UserError(f"job {job}: SLURM does not cancel it: {error}; see `gramian slurm status`") from None
            ended += 1
    if not ended:
        print("no job of this run is waiting or running")


def _states(job: str) -> dict[str, str]:
    """States of a job, or of an array's elements: those that have begun one by one, those that wait together."""
    states = {}
    for record in show_jobs(job):
        waiting = record.get("ArrayTaskId", "").partition("%")[0]
        name = job if not waiting else f"{job}_{waiting}" if waiting.isdecimal() else f"{job}_[{waiting}]"
        states[name] = record["JobState"]
    return states
