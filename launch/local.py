"""Starting workers on this machine, through torch elastic (what torchrun is made of)."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from common.errors import EXIT_BAD_INPUT
from launch import ROOT
from trainer.config import TrainingConfig
from trainer.rundir import run_directory


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_workers(config: TrainingConfig, config_path: str, overrides: list[str], nproc: int) -> None:
    """Run `nproc` workers and wait for them. Rank 0 has the terminal, the others write to `<run>/logs/`.

    Raises:
        SystemExit: 2 after a worker's bad input, 1 after any other failure; the first failure is told.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Workers must find our packages before a module of the user's of the same name, and share the cores.
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // nproc)))
    logs = run_directory(config).path / "logs"
    if logs.exists():
        shutil.rmtree(logs)
    logs.mkdir(parents=True)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"gramian-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(range(1, nproc), Std.ALL)),
    )
    # -P keeps the working directory off the workers' path.
    command = ["-P", "-m", "launch.worker", config_path, *overrides]
    try:
        elastic_launch(launch, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(_explain(logs, rank, failure.exitcode), file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT if failure.exitcode == EXIT_BAD_INPUT else 1) from None


def _explain(logs: Path, rank: int, exit_code: int) -> str:
    """What to tell of the first worker that failed. Rank 0 has already spoken on the terminal."""
    if rank == 0:
        return "" if exit_code == EXIT_BAD_INPUT else f"gramian: rank 0 failed with exit code {exit_code}; see above"
    files = sorted(logs.glob(f"**/{rank}/stderr.log"))
    lines = files[-1].read_text(encoding="utf-8", errors="replace").strip().splitlines() if files else []
    tail = lines[-1] if lines else "no output"
    place = files[-1] if files else logs
    return f"gramian: rank {rank} failed first, with exit code {exit_code}: {tail} (all of it in {place})"
