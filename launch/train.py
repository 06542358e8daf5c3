"""`gramian train`: check everything that can be checked, prepare the corpus, then start the workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from common.errors import Requeue, UserError
from common.files import next_numbered
from common.logs import setup_logging
from common.nodes import Nodes
from common.ranks import is_worker
from launch import worker
from launch.finish import is_finished, print_ways_on
from trainer.config import load_config
from trainer.layout import plan_layout
from trainer.outcome import outcome_told
from trainer.rundir import run_directory
from trainer.stop import heeded_signals


def run_train(config_path: str, overrides: list[str], nproc: int | None, dry_run: bool, nodes: Nodes) -> None:
    """Train `config_path` on `nproc` processes of this machine, and of the others of `nodes`; inside torchrun, be one
    of its workers."""
    if nodes.total == 1 and not dry_run and not is_worker():
        nodes = _in_slurm(config_path, overrides, nproc)
    if is_worker() and not dry_run:
        refuse_nproc(nproc, nodes)
        worker.run(config_path, overrides)
        return
    config = load_config(config_path, overrides)
    run = run_directory(config)
    if not dry_run:
        run.check_config(config)
        if is_finished(config, run):
            print_ways_on(config, run)
            return
        run.check_writable()
    nproc = nproc or default_processes()
    layout = plan_layout(config, nproc * nodes.total, nproc)
    if dry_run:
        from launch.dryrun import print_plan

        print_plan(config, layout)
        return

    from trainer.rundata import open_run_data
    from trainer.start import check_start, starting_checkpoint

    setup_logging()
    with outcome_told(run), _requeued_by_signals():
        starting_checkpoint(config, run)  # a path that leads nowhere is found before the corpus is read
        check_start(config, run, open_run_data(config, show_progress=sys.stderr.isatty()))
    if nproc * nodes.total == 1:
        worker.run(config_path, overrides)
        return

    from launch.local import start_workers

    logs = next_numbered(run.logs)
    if nodes.total > 1:
        logs = logs / f"machine-{nodes.rank}"
    logs.mkdir(parents=True, exist_ok=nodes.total > 1)
    words = ["-m", "launch.worker", config_path, *overrides]
    with outcome_told(run), _requeued_by_signals():
        start_workers(words, nproc, logs, run, config.launch.max_restarts, nodes)


@contextmanager
def _requeued_by_signals() -> Iterator[None]:
    """Before there are workers nothing is to be saved: a signal ends the work at once."""

    def stop(number: int, _: FrameType | None) -> NoReturn:
        raise Requeue(f"stopped by {signal.Signals(number).name} before training; the same command goes on")

    before = {number: signal.signal(number, stop) for number in heeded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_slurm(config_path: str, overrides: list[str], nproc: int | None) -> Nodes:
    """Take the place that SLURM gives this process: a rank, a launcher on one of several nodes, or none.

    In an allocation of several nodes outside of any step it does not return: srun takes its place.
    """
    from launch.slurm.step import read_step, step_to_start

    step = read_step(os.environ)
    if step is None:
        command = step_to_start(os.environ, nproc, "train", [config_path, *overrides])
        if command is not None:
            load_config(config_path, overrides)  # what is wrong is told once, and not on every node
            os.execvp(command[0], command)
        return Nodes()
    if step.starts_workers:
        return step.launchers(os.environ)
    refuse_nproc(nproc)
    step.become_rank(os.environ)
    return Nodes()


def refuse_nproc(nproc: int | None, nodes: Nodes = Nodes()) -> None:  # noqa: B008 - it is frozen
    """Raise a `UserError` if a worker is told how many processes to start."""
    if nproc is not None or nodes.total > 1:
        option = "--nproc" if nproc is not None else "--nnodes"
        raise UserError(
            f"{option} is for starting processes, but RANK or WORLD_SIZE says that this is one, or a step of several "
            f"tasks a node does; drop it"
        )


def default_processes() -> int:
    """One per GPU, or one on the CPU."""
    import torch

    return max(1, torch.cuda.device_count())
