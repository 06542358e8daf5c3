"""`gramian checkpoint export` and `gramian checkpoint import`: to Hugging Face folders and DeepSpeed, and from them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from common.errors import UserError
from launch.reports import align_right, check_writable, report_console, write_json
from trainer.rundir import find_checkpoint

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Request(NamedTuple):
    """An export, as asked for."""

    checkpoint: Path
    to: str
    out: Path
    precision: str
    max_shard_size: str
    dry_run: bool
    json_file: str | None


def run_export(request: Request) -> None:
    """Write a checkpoint as a Hugging Face folder, or say what would be written."""
    check_writable("--json", request.json_file)
    max_bytes = _bytes(request.max_shard_size)
    if request.to not in ("hf", "deepspeed"):
        raise UserError(f"--to {request.to}: not known; choose hf, a Hugging Face folder, or deepspeed")
    if request.precision not in ("fp32", "bf16", "fp16"):
        raise UserError(f"--dtype {request.precision}: not known; choose fp32, bf16 or fp16")
    folder = find_checkpoint(request.checkpoint)
    if request.to == "deepspeed":
        _export_universal(folder, request)
        return

    from trainer.exchange.export import export, plan_export
    from trainer.exchange.folders import check_new

    check_new(request.out)
    plan = plan_export(folder, request.precision, max_bytes)
    report = {**plan.report(), "dtype": request.precision, "out": str(request.out), "dry_run": request.dry_run}
    if not request.dry_run:
        with _progress("writing", report["parameters"]) as done:
            export(plan, request.out, done)
    write_json(request.json_file, report)
    if request.json_file != "-":
        if request.dry_run:
            _print_files(report["files"])
        what = "would hold" if request.dry_run else "holds"
        print(
            f"{request.out} {what} {report['model_type']}: {report['parameters']:,} parameters in {request.precision}, "
            f"{len(report['files'])} files, {report['bytes']:,} bytes"
        )
    _print_notes(report)


def _export_universal(folder: Path, request: Request) -> None:
    if request.dry_run or request.precision != "fp32":
        raise UserError("--to deepspeed has fp32 weights and no --dry-run; leave --dtype and --dry-run out")

    from trainer.exchange.universal import export_universal

    with _progress("writing", None) as done:
        report = export_universal(folder, request.out, done)
    write_json(request.json_file, report)
    if request.json_file != "-":
        print(f"{request.out} holds step {report['step']}: {report['parameters']:,} parameters in fp32")
        print(f"load it with engine.load_checkpoint('{request.out.parent}', tag='{request.out.name}')")
    _print_notes(report)


def run_import(
    folder: Path, out: Path, eos: str | None, json_file: str | None, source: str = "hf", config: Path | None = None
) -> None:
    """Write a Hugging Face folder as a checkpoint of weights, or DeepSpeed's universal one as it is."""
    check_writable("--json", json_file)
    if source not in ("hf", "deepspeed"):
        raise UserError(f"--from {source}: not known; choose hf, a Hugging Face folder, or deepspeed")
    if source == "hf" and config is not None:
        raise UserError("--config does nothing with --from hf, whose config.json tells the model; leave it out")
    if source == "deepspeed":
        _import_universal(folder, out, config, json_file)
        return

    from trainer.exchange.importing import import_folder

    with _progress("reading", None) as done:
        report = import_folder(folder, out, eos, done)
    write_json(json_file, report)
    if json_file != "-":
        print(f"{out} holds {report['model_type']}: {report['parameters']:,} parameters in fp32")
        print(f"try  gramian generate {out} --prompt 'def'")
    _print_notes(report)


def _import_universal(folder: Path, out: Path, config: Path | None, json_file: str | None) -> None:
    from trainer.config import load_config
    from trainer.exchange.universal import import_universal

    model = None
    if config is not None:
        tree = load_config(config)
        size = tree.data.known_vocab_size
        if tree.model.vocab_size is None and size is None:
            raise UserError(f"--config {config}: does not tell the size of the vocabulary; set model.vocab_size in it")
        model = tree.model if size is None else tree.model.with_vocab_size(size)
    with _progress("reading", None) as done:
        report = import_universal(folder, out, model, done)
    write_json(json_file, report)
    if json_file != "-":
        print(f"{out} holds step {report['step']}: {report['parameters']:,} parameters in fp32")
    _print_notes(report)


def _print_files(files: list[dict[str, Any]]) -> None:
    table = Table("file", "bytes")
    align_right(table, 1)
    for file in files:
        table.add_row(file["name"], f"{file['bytes']:,}")
    report_console().print(table)


def _print_notes(report: dict[str, Any]) -> None:
    for note in report["notes"]:
        print(f"gramian: note: {note}", file=sys.stderr)


@contextmanager
def _progress(word: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, for parameters."""
    columns = (TextColumn(word), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(word, total=total)
        yield lambda n_parameters: bar.advance(task, n_parameters)


def _bytes(text: str) -> int:
    """A size such as 5GB or 500MB, in powers of ten."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)B?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise UserError(f"--max-shard-size {text}: no size; give one such as 5GB or 500MB")
    return size
