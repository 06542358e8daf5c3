"""The commands `gramian sweep ...`. Heavy imports happen inside, as in `launch/cli.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.options import JsonFile
from launch.report_errors import user_errors

app = typer.Typer(no_args_is_help=True, help="Scaling laws: run a sweep, fit it, predict from it, draw it.")

Sweep = Annotated[Path, typer.Argument(metavar="SWEEP", help="YAML sweep, for example configs/sweeps/tiny.yaml.")]
MaybeSweep = Annotated[Path | None, typer.Argument(metavar="[SWEEP]", help="YAML sweep that has run; or give --from.")]
From = Annotated[
    Path | None, typer.Option("--from", metavar="FILE", help="Records of others: .csv, or .jsonl, an object a line.")
]
Column = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OURS=THEIRS",
        help="--from: which column is params, tokens, flops, loss, budget, group, lr, batch, variant. Several times.",
    ),
]
DropHighest = Annotated[int, typer.Option(min=0, help="Leave out this many records with the highest losses.")]
Budgets = Annotated[
    str | None, typer.Option(metavar="C,C,...", help="FLOPs of the budgets; a record within 10% belongs to one.")
]
Delta = Annotated[float, typer.Option(min=1e-9, help="Of the Huber loss of log losses.")]
Bootstrap = Annotated[int, typer.Option(min=20, help="Resampled fits for each interval.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the resampling.")]
Parameters = Annotated[
    str | None,
    typer.Option(help="Parameters N of a sweep: active, total, active_non_embedding, total_non_embedding."),
]
Flops = Annotated[str | None, typer.Option(help="FLOPs C of a sweep: causal, full_attention or 6nd.")]


@app.command()
def run(
    sweep: Sweep,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the table of runs, and stop.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Make the runs as arrays of SLURM jobs.")] = False,
    cluster: Annotated[str, typer.Option(metavar="FILE", help="--slurm: settings, as for slurm submit.")] = "default",
    gpus_per_node: Annotated[int, typer.Option(min=0, help="--slurm: GPUs of a run; 0: train on cores.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Make the runs of a sweep that are missing; what was stopped goes on, what is done is not made again."""
    with user_errors():
        from launch.sweep_run import OnCluster, run_sweep

        run_sweep(sweep, dry_run, json_file, OnCluster(cluster, gpus_per_node) if slurm else None)


@app.command()
def status(
    sweep: Sweep,
    watch: Annotated[
        float | None, typer.Option(min=0.2, metavar="SECONDS", help="Show it anew until all is done.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show where each run of a sweep is."""
    with user_errors():
        from launch.sweep_status import run_status

        run_status(sweep, watch, json_file)


@app.command()
def fit(
    sweep: MaybeSweep = None,
    from_file: From = None,
    column: Column = None,
    approach: Annotated[str, typer.Option(help="1, 2, 3, kaplan or all.")] = "all",
    drop_highest: DropHighest = 0,
    budgets: Budgets = None,
    delta: Delta = 1e-3,
    bootstrap: Bootstrap = 1000,
    seed: Seed = 0,
    count_params: Parameters = None,
    count_flops: Flops = None,
    json_file: JsonFile = None,
) -> None:
    """Fit scaling laws to a sweep or to records of others, with 95% intervals."""
    with user_errors():
        from launch.sweep_fit import Source, run_fit
        from scaling.analysis import Settings

        source = Source(sweep, from_file, column or [], drop_highest, budgets, count_params, count_flops)
        run_fit(source, Settings(approach, delta, bootstrap, seed), json_file)


@app.command()
def predict(
    flops_budget: Annotated[float, typer.Option("--flops", metavar="C", help="Compute to plan for.")],
    sweep: MaybeSweep = None,
    from_file: From = None,
    column: Column = None,
    variant: Annotated[str | None, typer.Option(help="Of a sweep with several; default: the first.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a config of about that size and length there.")
    ] = None,
    drop_highest: DropHighest = 0,
    budgets: Budgets = None,
    delta: Delta = 1e-3,
    bootstrap: Bootstrap = 1000,
    seed: Seed = 0,
    count_params: Parameters = None,
    count_flops: Flops = None,
    json_file: JsonFile = None,
) -> None:
    """The best N and D for a compute budget, and the loss to expect, with 95% intervals."""
    with user_errors():
        from launch.sweep_fit import Source, run_predict
        from scaling.analysis import Settings

        source = Source(sweep, from_file, column or [], drop_highest, budgets, count_params, count_flops)
        run_predict(source, Settings("all", delta, bootstrap, seed), flops_budget, variant, out, json_file)


@app.command()
def report(
    sweep: MaybeSweep = None,
    from_file: From = None,
    column: Column = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write; default: report/ of the sweep.")
    ] = None,
    drop_highest: DropHighest = 0,
    budgets: Budgets = None,
    delta: Delta = 1e-3,
    bootstrap: Bootstrap = 1000,
    seed: Seed = 0,
    count_params: Parameters = None,
    count_flops: Flops = None,
) -> None:
    """Write one HTML file with all fits, pictures and records; the pictures also as PNG."""
    with user_errors():
        from launch.sweep_fit import Source
        from launch.sweep_report import run_report
        from scaling.analysis import Settings

        source = Source(sweep, from_file, column or [], drop_highest, budgets, count_params, count_flops)
        run_report(source, Settings("all", delta, bootstrap, seed), out)
