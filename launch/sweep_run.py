"""`gramian sweep run`: the table of runs, the runs, their records, and the prediction of what is held out."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from common.errors import CheckFailed, UserError
from common.files import atomic_write, hash_json, locked
from launch.reports import align_right, check_writable, report_console, write_json
from launch.slurm.cluster import load_cluster
from launch.slurm.submit import check_cluster
from launch.sweep_executor import Executor
from launch.sweep_local import LocalExecutor
from launch.sweep_slurm import SlurmExecutor
from launch.sweep_tasks import Result, SweepFolder, Task, plan_tasks, record_of
from launch.sweep_told import with_interval
from scaling.analysis import Settings, analyse
from scaling.design import Cell, design
from scaling.predict import losses_at, optimum, plain_optimum
from scaling.records import read_points
from scaling.sweepfile import SweepConfig, load_sweep

_ASSUMED_MFU = 0.25


class OnCluster(NamedTuple):
    """`--slurm`: runs are jobs of a cluster."""

    cluster: str
    gpus: int  # of a run


def run_sweep(path: Path, dry_run: bool, json_file: str | None, on_cluster: OnCluster | None = None) -> None:
    """Print the table; unless `dry_run`, make the runs that are missing, here or on a cluster."""
    check_writable("--json", json_file)
    sweep = load_sweep(path)
    cells, folder = design(sweep), SweepFolder(sweep.folder)
    console = Console(stderr=True, quiet=True) if json_file == "-" else report_console()
    if dry_run:
        write_json(json_file, print_table(console, sweep, cells, folder))
        return
    execution = sweep.execution
    executor: Executor
    if on_cluster is not None:
        cluster = load_cluster(on_cluster.cluster)
        check_cluster(cluster, 1, on_cluster.gpus)
        executor = SlurmExecutor(folder, cluster, on_cluster.gpus, execution.parallel, execution.retries)
    else:
        executor = LocalExecutor(folder, execution.parallel, execution.threads, execution.retries)
    _check_data(cells)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"'dir': cannot make {folder.path}: {error.strerror}; set dir to another folder") from None
    try:
        with locked(folder.lock_file, wait=False):
            print_table(console, sweep, cells, folder)
            failures = _run(console, sweep, cells, folder, executor)
    except BlockingIOError:
        raise UserError(f"{folder.path} is in use by another `gramian sweep run`; wait for it") from None
    records = folder.records()
    write_json(json_file, {"records": [records[cell.id] for cell in cells if cell.id in records], "failed": failures})
    if failures:
        name, reason = next(iter(failures.items()))
        raise CheckFailed(
            f"{len(failures)} of {len(cells)} runs failed; {name}: {reason}; the same command tries them again"
        )
    console.print(f"records  {folder.records_file}\nnext     gramian sweep report {path}", markup=False)


def _check_data(cells: list[Cell]) -> None:
    """Prepare each corpus once, before runs race for it, and find what no run could start with."""
    from trainer.rundata import open_run_data
    from trainer.rundir import run_directory
    from trainer.start import check_start

    seen: set[str] = set()
    for cell in cells:
        key = hash_json([cell.config.data.origin(), cell.config.data.seq_len])
        if key not in seen:
            seen.add(key)
            check_start(cell.config, run_directory(cell.config), open_run_data(cell.config))


def _run(
    console: Console, sweep: SweepConfig, cells: list[Cell], folder: SweepFolder, executor: Executor
) -> dict[str, str]:
    """Make what is missing; reasons of what failed, by run."""
    failures: dict[str, str] = {}
    first = [cell for cell in cells if not cell.held_out]
    held_out = [cell for cell in cells if cell.held_out]
    share = sweep.execution.share_prefix
    _adopt(folder, cells)
    _make(console, executor, folder, plan_tasks(folder, cells, first, share), failures)
    if held_out and not failures:
        predict_held_out(console, sweep, folder, held_out, {cell.id for cell in first})
        _make(console, executor, folder, plan_tasks(folder, cells, held_out, share), failures)
    return failures


def _adopt(folder: SweepFolder, cells: list[Cell]) -> None:
    """Records of runs that were finished when the sweep was killed before it could write them."""
    from launch.finish import is_finished

    done = folder.records()
    for cell in cells:
        run = folder.run_of(cell.name)
        if cell.id not in done and is_finished(cell.config, run):
            folder.append(record_of(cell, run, diverged=False))


def _make(
    console: Console, executor: Executor, folder: SweepFolder, tasks: list[Task], failures: dict[str, str]
) -> None:
    if not tasks:
        return
    begin, total, done = time.monotonic(), sum(task.flops for task in tasks), 0.0

    def ended(result: Result) -> None:
        nonlocal done
        task = result.task
        done += task.flops
        if result.code != 0 and not result.diverged:
            failures[task.key] = result.reason
            folder.events.record("failed", run=task.key, reason=result.reason)
            console.print(f"failed   {task.key}: {result.reason}", markup=False)
            return
        what = "trunk"
        if task.cell is not None:
            record = record_of(task.cell, task.run, result.diverged)
            folder.append(record)
            what = "diverged" if record["loss"] is None else f"loss {record['loss']:.4f}"
        seconds = time.monotonic() - begin
        left = "" if done >= total else f", about {duration(seconds * (total / done - 1))} left"
        console.print(f"done     {task.key}: {what} ({done / total:.0%} after {duration(seconds)}{left})", markup=False)

    executor.run(tasks, ended)


def predict_held_out(
    console: Console, sweep: SweepConfig, folder: SweepFolder, cells: list[Cell], others: set[str]
) -> None:
    """Write down what the cells of the other budgets say of the largest one, before any of its runs is started."""
    said, done = folder.predictions(), folder.records()
    if all(cell.id in said or cell.id in done for cell in cells):
        return
    points = read_points(folder.records_file, {}, sweep.counting, leave_out=done.keys() - others)
    for name in dict.fromkeys(cell.variant for cell in cells):
        of_variant = [cell for cell in cells if cell.variant == name]
        common: dict[str, Any] = {"variant": name, "records": len(points), "time": round(time.time(), 3)}
        try:
            analysis = analyse(points.take(points.variant == name), Settings("3"))
        except UserError as error:
            said |= {cell.id: {**common, "refused": str(error)} for cell in of_variant}
            console.print(f"predict  {name or 'largest budget'} refused: {error}", markup=False)
            continue
        sizes, flops = np.array([cell.counted(sweep.counting) for cell in of_variant], dtype=float).T
        tokens = np.array([cell.tokens for cell in of_variant], dtype=float)
        draws = analysis.surfaces["hoffmann"].draws
        least = optimum(analysis.best, draws, float(np.median(flops)), of_run=False)
        common["least"] = plain_optimum(least)
        told = with_interval(least.loss, ".4f")
        console.print(f"predict  {name or 'largest budget'}: least loss {told}", markup=False)
        for cell, one in zip(of_variant, losses_at(draws, sizes, tokens), strict=True):
            said[cell.id] = {**common, **one.plain()}
            console.print(f"predict  {cell.name}: loss {with_interval(one, '.4f')}", markup=False)
    atomic_write(folder.prediction_file, json.dumps(said, indent=1) + "\n")


def print_table(console: Console, sweep: SweepConfig, cells: list[Cell], folder: SweepFolder) -> dict[str, Any]:
    """The runs with what each costs; also as JSON."""
    done = folder.records()
    rate, source = _rate(sweep, done)
    tasks = {task.key: task for task in plan_tasks(folder, cells, cells, sweep.execution.share_prefix)}
    table = Table("run", "N", "tokens D", "D/N", "steps", "FLOPs", "time", "")
    align_right(table, 1, 2, 3, 4, 5, 6)
    rows = []
    for cell in cells:
        n, flops = cell.counted(sweep.counting)
        state = "done" if cell.id in done else "held out" if cell.held_out else ""
        if cell.name in tasks and tasks[cell.name].flops < cell.flops["causal"]:
            state = f"{state} branch".strip()
        seconds = tasks[cell.name].flops / rate if cell.name in tasks else 0.0
        numbers = (f"{n:,}", f"{cell.tokens:,}", f"{cell.tokens / n:.1f}", f"{cell.config.train.steps:,}")
        table.add_row(cell.name, *numbers, f"{flops:.3g}", duration(seconds), state)
        row = {"run": cell.name, "cell": cell.id, "params": n, "tokens": cell.tokens, "flops": flops}
        rows.append({**row, "steps": cell.config.train.steps, "seconds": seconds, "state": state})
    console.print(table)
    whole = sum(cell.flops["causal"] for cell in cells if cell.id not in done)
    work = sum(task.flops for task in tasks.values())
    hours = work / rate / sweep.execution.parallel / 3600
    counting = sweep.counting
    left = sum(cell.id not in done for cell in cells)
    console.print(
        f"counted  N: {counting.parameters}; C: {counting.flops}; D: positions\n"
        f"work     {left} of {len(cells)} runs left, {work:.3g} FLOPs"
        f"{f' ({whole:.3g} without shared prefixes)' if work < 0.999 * whole else ''}\n"
        f"time     {duration(3600 * hours)}, {sweep.execution.parallel} at a time, each at {rate / 1e9:.3g} GFLOP/s "
        f"({source})",
        markup=False,
    )
    price = sweep.execution.price_per_hour
    if price is not None:
        console.print(f"cost     {hours * price:.2f} at {price:g} an hour", markup=False)
    summary = {"flops": work, "flops_unshared": whole, "hours": hours, "rate": rate, "rate_source": source}
    return {"runs": rows, **summary, "cost": None if price is None else hours * price}


def _rate(sweep: SweepConfig, records: dict[str, dict[str, Any]]) -> tuple[float, str]:
    """FLOP/s of one run, and where the number is from."""
    measured = [record["flops_per_second"] for record in records.values() if record["flops_per_second"]]
    if measured:
        return statistics.median(measured), f"the median of {len(measured)} runs"
    if sweep.execution.flops_per_second is not None:
        return sweep.execution.flops_per_second, "execution.flops_per_second"
    import torch

    from trainer.throughput import peak_flops

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(sweep.execution.threads)
    peak = peak_flops(device, "fp32")[0]
    torch.set_num_threads(threads)
    return _ASSUMED_MFU * peak, f"assumed, {_ASSUMED_MFU:.0%} of the matmul rate"


def duration(seconds: float) -> str:
    """In words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
