"""`gramian sweep fit` and `gramian sweep predict`."""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.errors import UserError
from launch.reports import align_right, check_writable, report_console, write_json
from launch.sweep_told import Line, Rows, between, told, with_interval
from scaling.analysis import APPROACHES, Settings, analyse, analyse_variants, multipliers
from scaling.predict import Optimum, optimum, plain_optimum
from scaling.records import Counting, FlopCount, ParameterCount, Points, read_points
from scaling.sweepfile import SweepConfig, load_sweep


@dataclass(frozen=True)
class Source:
    """Where records are from, and how they are to be read."""

    sweep: Path | None
    file: Path | None
    columns: list[str]
    drop_highest: int = 0
    budgets: str | None = None
    count_params: str | None = None
    count_flops: str | None = None

    @cached_property
    def config(self) -> SweepConfig:
        """The sweep's file."""
        assert self.sweep is not None
        return load_sweep(self.sweep)

    def points(self) -> Points:
        """Read them."""
        if (self.sweep is None) == (self.file is None):
            raise UserError("give a sweep's file, or records of others with --from FILE: one of the two")
        columns = dict(_pair(word) for word in self.columns)
        budgets = [_flops(word) for word in (self.budgets or "").split(",") if word]
        given = {"parameters": self.count_params, "flops": self.count_flops}
        for (name, value), kind in zip(given.items(), (ParameterCount, FlopCount), strict=True):
            if value is not None and value not in typing.get_args(kind):
                option = "--count-params" if name == "parameters" else "--count-flops"
                raise UserError(f"{option} {value}: choose {', '.join(typing.get_args(kind))}")
        if self.file is not None:
            if self.count_params or self.count_flops:
                raise UserError("--from: N and C are what the columns hold; leave --count-params and --count-flops out")
            return read_points(self.file, columns, Counting(), self.drop_highest, budgets)
        from launch.sweep_tasks import SweepFolder
        from scaling.design import design

        folder = SweepFolder(self.config.folder)
        counting = self.config.counting.model_copy(update={k: v for k, v in given.items() if v is not None})
        others = folder.records().keys() - {cell.id for cell in design(self.config)}  # of what the file had before
        points = read_points(folder.records_file, columns, counting, self.drop_highest, budgets, others)
        note = f"{len(others)} records of runs that the sweep no longer has are left out"
        return replace(points, notes=(*points.notes, note)) if others else points


def _pair(word: str) -> tuple[str, str]:
    ours, equals, theirs = word.partition("=")
    if not equals or not theirs:
        raise UserError(f"--column {word}: give it as OURS=THEIRS, for example params=n_params")
    return ours, theirs


def _flops(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise UserError(f"--budgets: '{word}' is no number of FLOPs above 0; give for example 1e18,3e18,1e19")
    return value


def run_fit(source: Source, settings: Settings, json_file: str | None) -> None:
    """Print, and write, what the records say."""
    check_writable("--json", json_file)
    if settings.approach not in (*APPROACHES, "all"):
        raise UserError(f"--approach {settings.approach}: choose {', '.join(APPROACHES)} or all")
    points = source.points()
    analyses = analyse_variants(points, settings)
    reference = next(iter(analyses))
    factors = multipliers(analyses, reference)
    record = {
        "variants": {name or "all": analysis.plain() for name, analysis in analyses.items()},
        "compute multiplier": {name: {"over": reference, **found.plain()} for name, found in factors.items()},
    }
    write_json(json_file, record)
    if json_file != "-":
        console = report_console()
        for name, analysis in analyses.items():
            console.print(f"{points.source}{f', {name}' if name else ''}", markup=False)
            for part in told(analysis):
                _print(console, part)
        for name, found in factors.items():
            console.print(f"{name}: {with_interval(found)} times the compute of {reference}", markup=False)


def _print(console: Console, part: Rows | Line) -> None:
    if isinstance(part, Line):
        console.print(f"  {part.text}", markup=False)
        return
    table = Table(*part.head)
    align_right(table, *range(1, len(part.head)))
    for row in part.rows:
        table.add_row(*row)
    console.print(table)


def run_predict(
    source: Source, settings: Settings, flops: float, variant: str | None, out: Path | None, json_file: str | None
) -> None:
    """Print, and write, the best use of a budget; with `out`, a config of it."""
    check_writable("--json", json_file)
    if not flops > 0 or flops == float("inf"):
        raise UserError(f"--flops {flops:g}: give a compute budget above 0, for example 1e21")
    if out is not None:
        check_writable("--out", str(out))
        if source.sweep is None:
            raise UserError("--out needs a sweep, whose base config and sizes say what to train; or leave it out")
    variants = source.points().by_variant()
    if variant is not None and variant not in variants:
        raise UserError(f"--variant {variant}: the records have {', '.join(variants) or 'no variants'}")
    chosen = next(iter(variants)) if variant is None else variant
    analysis = analyse(variants[chosen], replace(settings, approach="3"))
    surface, best = analysis.surfaces["hoffmann"], analysis.best
    found = optimum(best, surface.draws, flops)
    record: dict[str, Any] = {"variant": chosen, **plain_optimum(found), "beyond": flops / float(best.flops.max())}
    if out is not None:
        from scaling.design import write_config_for

        record["config"] = write_config_for(source.config, chosen, flops, found.params.value, out)
    write_json(json_file, record)
    if json_file != "-":
        _print_optimum(found, record, surface.warnings)


def _print_optimum(found: Optimum, record: dict[str, Any], warnings: list[str]) -> None:
    console = report_console()
    named = (("parameters N", found.params, ".4g"), ("tokens D", found.tokens, ".4g"), ("loss", found.loss, ".4f"))
    rows = [(name, f"{of.value:{style}}", between(of.low, of.high, style)) for name, of, style in named]
    rows.append(("tokens per parameter", f"{found.tokens.value / found.params.value:.3g}", ""))
    _print(console, Rows((f"{found.flops:.3g} FLOPs", "value", "95%"), rows))
    if record["beyond"] > 1:
        times = f"{record['beyond']:.3g} times the largest compute that was measured"
        _print(console, Line(f"{times}: an extrapolation"))
    for warning in warnings:
        _print(console, Line(f"warning: {warning}"))
    if "config" in record:
        _print(console, Line(f"config {record['config']['file']}: {record['config']['summary']}"))
