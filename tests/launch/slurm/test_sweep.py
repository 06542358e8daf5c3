"""A sweep whose runs are jobs of a SLURM cluster."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.commands import BIN, environment
from tests.launch.slurm.cluster import Cluster
from tests.launch.test_sweep_commands import records, sweep_run, write
from trainer.rundir import RunDirectory

pytestmark = pytest.mark.timeout(600)
# Three runs that need nothing of one another; `make verify` has the project's smallest sweep, with its trunks.
ONE_WAVE = {"budgets": {"flops": [5.0e9]}, "hold_out_largest": False}


def on_the_cluster(cluster: Cluster, file: Path) -> str:
    """`gramian sweep run --slurm`, from beginning to end."""
    settings = cluster.file(file.with_suffix(".cluster.yaml"), "n[0-1]")
    words = ["gramian", "sweep", "run", str(file), "--slurm", "--cluster", str(settings)]
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        env=environment(**cluster.variables),
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("changes", [ONE_WAVE, pytest.param({}, marks=pytest.mark.verify)], ids=["wave", "trunks"])
def test_the_same_records_as_here(cluster: Cluster, corpus: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    """But for times. Each run was started once, and left no job behind."""
    here, there = (write(tmp_path, corpus, name, **changes) for name in ("here", "there"))
    assert sweep_run(here) == 0
    told = on_the_cluster(cluster, there)
    assert told.count("done     ") >= 3
    ours, theirs = records(tmp_path, "here"), records(tmp_path, "there")
    assert ours.keys() == theirs.keys()
    assert ours == theirs
    assert on_the_cluster(cluster, there).count("done     ") == 0
    assert not list((tmp_path / "there" / "slurm").glob("0002"))


@pytest.mark.verify
def test_stopped_and_continued(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    """What runs is saved, what waits does not begin; the same command goes on to the same records."""
    longer = {**ONE_WAVE, "budgets": {"flops": [2.0e10]}, "execution": {"parallel": 1}}
    file = write(tmp_path, corpus, "stopped", **longer)
    settings = cluster.file(tmp_path / "cluster.yaml", "n[0-1]")
    words = [str(BIN / "gramian"), "sweep", "run", str(file), "--slurm", "--cluster", str(settings)]
    process = subprocess.Popen(words, env=environment(**cluster.variables), stdout=subprocess.DEVNULL)
    runs = tmp_path / "stopped" / "runs"
    try:
        cluster.until(lambda: any(run.read_metrics() for run in map(RunDirectory, runs.glob("*"))), 120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    finally:
        process.kill()
        process.wait()
    assert len(records(tmp_path, "stopped")) < 3
    assert cluster.run("squeue", "-h", "-n", "sweep-stopped").strip() == ""
    assert on_the_cluster(cluster, file).count("done     ") >= 1
    assert len(records(tmp_path, "stopped")) == 3
