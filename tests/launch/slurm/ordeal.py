"""One job that meets preemption, the time limit, the death of a node during a save, and a requeue by hand."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from launch import ROOT
from tests.gang import Gang
from tests.killing import assert_same_end
from tests.launch.slurm.cluster import Cluster
from tests.launch.slurm.consumed import hash_chain, written_down
from tests.runs import train_worker
from trainer.rundir import RunDirectory

# The MoE quickstart, its model and its Muon; rows and batches are shorter.
CONFIG = str(ROOT / "configs" / "moe-quickstart.yaml")
HARD = ("parallel.ep=2", "parallel.engine=deepspeed", "parallel.zero_stage=2")
STEPS = 90
EVENTS = ("preempt", "time limit", "node dies", "requeue")


class Ordeal(NamedTuple):
    """What came of it."""

    run: RunDirectory
    job: str
    log: str
    chain: list[str]
    met: list[dict[str, Any]]
    left_behind: list[int]


def keys(corpus: Path, folder: Path, *more: str) -> list[str]:
    return [
        *(f"data.corpus={corpus}", f"run.dir={folder}", "run.name=ordeal", f"train.steps={STEPS}", *HARD),
        *("data.seq_len=32", "train.global_batch_size=16", "train.micro_batch_size=4", "eval.batches=0"),
        *("log.every=1", "checkpoint.every=3", "checkpoint.keep=2", *more),
    ]


def unbroken(gang: Gang, corpus: Path, folder: Path, world: int, *more: str) -> tuple[RunDirectory, list[str]]:
    """The same run on processes of this machine, that nothing happens to, and its chain of tokens."""
    folder.mkdir()
    variables = written_down(folder)
    words = [CONFIG, *keys(corpus, folder, "checkpoint.every=50", *more)]
    assert gang.run(_train, words, variables, world=world) == [0] * world
    return RunDirectory(folder / "ordeal"), hash_chain(folder)


def _train(words: list[str], variables: dict[str, str]) -> int:
    import runpy
    from unittest import mock

    import trainer.loop
    from data.prefetch import Prefetched

    patched = runpy.run_path(f"{variables['PYTHONPATH']}/sitecustomize.py")
    with mock.patch.dict(os.environ, variables), mock.patch.object(Prefetched, "train", Prefetched.train):
        patched["patch"](trainer.loop)
        try:
            return train_worker(words)
        finally:
            import sys

            sys.meta_path.remove(patched["Finder"])


def through(
    cluster: Cluster,
    corpus: Path,
    folder: Path,
    generator: random.Random,
    nproc: int,
    *more: str,
    happenings: tuple[str, ...] = EVENTS,
) -> Ordeal:
    """Submit the run on two nodes, and let things happen to it at random instants, in any order."""
    folder.mkdir()
    nodes = cluster.file(folder / "cluster.yaml", exclude="n[2-3]")
    job = cluster.submit(
        *(CONFIG, "--nodes", "2", "--nproc", nproc, "--time", "30", "--cluster", nodes, *keys(corpus, folder, *more)),
        **written_down(folder),
        OMP_NUM_THREADS="1",
    )
    run, met = RunDirectory(folder / "ordeal"), []
    log = run.path / "slurm" / "0000" / f"log-{job}.txt"
    told = lambda: log.read_text() if log.exists() else "no log yet"  # noqa: E731

    def step() -> int:
        return max((row["step"] for row in run.read_metrics()), default=0)

    events = list(happenings)
    generator.shuffle(events)
    for number, event in enumerate(events):
        # Spread over the run, so that every start makes some steps before the next thing happens to it.
        share = STEPS // (len(events) + 1)
        goal = max(step() + 2, generator.randint(number * share, (number + 1) * share - 5))
        cluster.until(lambda goal=goal: step() >= goal and cluster.state(job) == "RUNNING", 120, told)
        restarts = int(cluster.record(job)["Restarts"])
        met.append({"event": event, "step": step(), "newest_checkpoint": max(run.committed(), default=0)})
        _HAPPENINGS[event](cluster, job, run)
        cluster.until(lambda r=restarts: int(cluster.record(job)["Restarts"]) > r, 120, told)
    cluster.until(lambda: cluster.state(job) not in ("RUNNING", "PENDING", "COMPLETING"), 240, told)
    cluster.until(lambda: not cluster.processes(SLURM_JOB_ID=job), 30)
    left = cluster.processes(SLURM_JOB_ID=job)
    assert cluster.state(job) == "COMPLETED", told()
    return Ordeal(run, job, told(), hash_chain(folder), met, left)


def _preempt(cluster: Cluster, job: str, run: RunDirectory) -> None:
    """A job of a higher priority takes the job's nodes, for as long as it takes to go."""
    nodes = cluster.record(job)["NodeList"]
    script = run.path.parent / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 1\n")
    log = f"--output={run.path.parent}/urgent.txt"
    cluster.run("sbatch", "-p", "urgent", "-w", nodes, "-N", "2", "--exclusive", "--time=5", log, str(script))


def _time_limit(cluster: Cluster, job: str, run: RunDirectory) -> None:
    """The job's time is nearly over; the next start has more."""
    slowly = run.path.parent / "consumed" / "slowly"  # SLURM looks at limits every half a minute
    slowly.touch()
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    cluster.until(lambda: cluster.state(job) == "PENDING", 120)
    slowly.unlink()
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")


def _node_dies(cluster: Cluster, job: str, run: RunDirectory) -> None:
    """The second node, while a save goes on in the background; it comes back when SLURM has noticed."""
    (*_, name) = cluster.run("scontrol", "show", "hostnames", cluster.record(job)["NodeList"]).split()
    begun = set(run.saved())

    def saving() -> bool:
        return bool(set(run.saved()) - begun - set(run.committed()))

    deadline = time.monotonic() + 20
    while not saving() and time.monotonic() < deadline:
        time.sleep(0.001)
    cluster.kill_node(name)
    cluster.until(lambda: cluster.state(job) != "RUNNING", 60)
    cluster.start_node(name)


def _requeue(cluster: Cluster, job: str, run: RunDirectory) -> None:
    cluster.run("scontrol", "requeue", job)


_HAPPENINGS = {"preempt": _preempt, "time limit": _time_limit, "node dies": _node_dies, "requeue": _requeue}


def assert_unharmed(ordeal: Ordeal, plain: RunDirectory, chain: list[str]) -> None:
    """All that a run must keep, whatever happens to it."""
    assert_same_end(ordeal.run, plain, STEPS)
    assert ordeal.chain == chain
    losses: dict[str, set[str]] = {}
    for step, loss in re.findall(r"^step +(\d+)/\d+  loss (\S+)", ordeal.log, re.M):
        losses.setdefault(step, set()).add(loss)
    assert len(losses) == STEPS
    assert {step: found for step, found in losses.items() if len(found) > 1} == {}
    assert ordeal.left_behind == []
    shutil.rmtree(ordeal.run.path.parent / "consumed")
