"""`gramian certify`: prove a config's layout on the ranks at hand, before it is trained."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from common.errors import EXIT_BAD_INPUT, CheckFailed
from common.logs import setup_logging
from common.ranks import is_worker, read_place
from launch.certify_tables import print_tables
from launch.reports import check_writable, report_console, write_json
from launch.train import default_processes, refuse_nproc
from trainer.certify.findings import Finding, as_json
from trainer.config import TrainingConfig, load_config
from trainer.layout import plan_layout

if TYPE_CHECKING:
    from trainer.certify.repeat import Repeated


@dataclass(frozen=True)
class Request:
    """The words of the command line."""

    config_path: str
    overrides: list[str]
    steps: int
    repeat: bool
    may_shrink: bool
    json_file: str | None

    def words(self) -> list[str]:
        """For a worker."""
        options = ["--steps", str(self.steps), *["--repeat"] * self.repeat, *["--no-shrink"] * (not self.may_shrink)]
        if self.json_file is not None:
            options += ["--json", self.json_file]
        return [*options, "--", self.config_path, *self.overrides]


def run_certify(request: Request, nproc: int | None) -> None:
    """Certify on `nproc` processes of this machine; inside torchrun, be one of its workers.

    Raises:
        CheckFailed: something differs by more than it may; on rank 0.
    """
    if is_worker():
        refuse_nproc(nproc)
    config = load_config(request.config_path, request.overrides)
    if is_worker():
        plan_layout(config, read_place().world_size)
        _work(request, config)
        return
    nproc = nproc or default_processes()
    plan_layout(config, nproc)
    check_writable("--json", request.json_file)

    from trainer.rundata import open_run_data

    setup_logging(quiet=request.json_file == "-")
    open_run_data(config, show_progress=sys.stderr.isatty())
    if nproc == 1:
        _work(request, config)
        return

    from launch.local import ended_with_a_finding, start_workers

    logs = Path(tempfile.mkdtemp(prefix="gramian-certify-"))
    try:
        start_workers(["-m", "gramian", "certify", *request.words()], nproc, logs)
    except SystemExit as end:
        if end.code == EXIT_BAD_INPUT or ended_with_a_finding(logs):
            shutil.rmtree(logs, ignore_errors=True)  # otherwise what is told points into it
        raise
    shutil.rmtree(logs, ignore_errors=True)


def _work(request: Request, config: TrainingConfig) -> None:
    """Be one of the ranks. Rank 0 tells what was found."""
    from launch.report_errors import user_errors
    from trainer.certify.layout import certify_layout
    from trainer.certify.repeat import certify_repeat
    from trainer.runtime import start_runtime

    setup_logging(quiet=request.json_file == "-")
    steps = min(request.steps, config.train.steps)
    console = report_console(stderr=request.json_file == "-")
    with start_runtime(config.train.deterministic) as runtime, user_errors():

        def say(text: str) -> None:
            if runtime.is_main:
                console.print(text, markup=False)

        if request.repeat:
            repeated = certify_repeat(config, runtime, steps, say)
        else:
            findings, model = certify_layout(config, runtime, steps, request.may_shrink, say)
    if not runtime.is_main:
        return
    about = {"config": config.tree(), "world_size": runtime.world_size, "steps": steps}
    if request.repeat:
        write_json(request.json_file, about | _repeat_record(repeated))
        _tell_repeat(repeated, console)
        return
    rows = findings.worst_first()
    failures = findings.failures()
    record = {"model": model.model_dump(mode="json"), "passed": not failures, "rows": [_row(r) for r in rows]}
    write_json(request.json_file, about | record)
    print_tables(console, rows)
    if failures:
        worst = failures[0]
        more = f"; and {len(failures) - 1} more" if len(failures) > 1 else ""
        raise CheckFailed(
            f"not certified: {worst.subject()} differs by {worst.difference:.2g} at step {worst.step}, allowed "
            f"{worst.allowed:.2g}{more}"
        )
    console.print(
        f"certified: {steps} step{'s' * (steps > 1)} on {runtime.world_size} rank{'s' * (runtime.world_size > 1)} "
        f"equal one plain process; of {len(rows)} things compared the worst is the {rows[0].subject()}",
        markup=False,
    )


def _tell_repeat(repeated: Repeated, console: Console) -> None:
    if repeated.difference is not None:
        step, rank, names = repeated.difference
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckFailed(
            f"not repeatable: two runs of the same config differ from step {step} on, on rank {rank} in {names[0]}"
            f"{more}; set train.deterministic=true"
        )
    console.print(
        f"repeatable: {repeated.steps} steps twice, the same bits in the loss, the gradient norm and "
        f"{repeated.tensors} weights and optimizer states of every rank",
        markup=False,
    )


def _repeat_record(repeated: Repeated) -> dict[str, Any]:
    difference = repeated.difference
    return {
        "passed": difference is None,
        "tensors": repeated.tensors,
        "first_difference": None if difference is None else difference._asdict(),
    }


def _row(finding: Finding) -> dict[str, Any]:
    return {
        "quantity": finding.quantity,
        "parameter": finding.parameter,
        "difference": as_json(finding.difference),
        "allowed": finding.allowed,
        "step": finding.step,
        "passed": finding.passed,
    }
