"""The commands `gramian slurm ...`. Heavy imports happen inside, as in `launch/cli.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.options import ConfigFile, JsonFile, Overrides
from launch.report_errors import user_errors

app = typer.Typer(no_args_is_help=True, help="Train on a SLURM cluster.")

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, of an array the one of its name.")]


@app.command("submit")
def submit_job(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of each node; 0: train on its cores.")] = 0,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on each node. Default: one per GPU, or one.")
    ] = None,
    cluster: Annotated[
        str, typer.Option(metavar="FILE", help="Settings of the cluster: a file, or a name in configs/cluster.")
    ] = "default",
    partition: Annotated[str | None, typer.Option(help="Partition, instead of the cluster file's.")] = None,
    account: Annotated[str | None, typer.Option(help="Account, instead of the cluster file's.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, as 1-00:00:00 or minutes.")] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=[VALUE, ...]", help="An array, a run for each value. May be given several times."),
    ] = None,
    array: Annotated[
        str | None, typer.Option(help="Which runs of --vary, and how many at a time: 0-3%2, 1,3 or %2. Default: all.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show plan and script, and stop.")] = False,
) -> None:
    """Submit a training job that saves and begins anew when it is preempted, out of time, or loses a node."""
    with user_errors():
        from launch.slurm.submit import Request, run_submit

        options = {"partition": partition, "account": account, "time": time}
        words = list(overrides or [])
        run_submit(Request(config, words, nodes, gpus_per_node, nproc, cluster, options, array, vary or [], dry_run))


@app.command("status")
def show_status(
    run: RunFolder,
    lines: Annotated[int, typer.Option(min=0, help="Last lines of the log to show.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Show state, step, loss, restarts, time left and the end of the log."""
    with user_errors():
        from launch.slurm.status import run_status

        run_status(run.absolute(), lines, json_file)


@app.command("cancel")
def cancel_job(
    run: RunFolder,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a save.")] = False,
) -> None:
    """End a run's jobs, and do not start them again. Those that run save first."""
    with user_errors():
        from launch.slurm.status import run_cancel

        run_cancel(run.absolute(), now)
