"""Jobs on a real SLURM: started by srun, by torchrun and by hand, as arrays, and through whatever may happen to one.

All are submitted at once, and looked at as they end.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.docs.test_docs import ROOT, SMALLER
from tests.gang import Gang
from tests.launch.commands import BIN, environment
from tests.launch.slurm import ordeal
from tests.launch.slurm.cluster import Cluster
from tests.launch.slurm.ordeal import Ordeal
from tests.runs import train_worker, worst_difference
from trainer.outcome import read_outcome
from trainer.rundir import RunDirectory

pytestmark = pytest.mark.timeout(400)

CONFIG = ROOT / "configs" / "quickstart.yaml"


class Jobs(NamedTuple):
    """What was submitted."""

    folder: Path
    tasks: str
    torchrun: str
    array: str
    by_hand: subprocess.Popen[str]
    hard: Future[Ordeal]

    def run(self, name: str) -> RunDirectory:
        return RunDirectory(self.folder / name)


def keys(corpus: Path, folder: Path, name: str) -> list[str]:
    smaller = [word for word in SMALLER if not word.startswith("train.global")]
    return [*smaller, "train.global_batch_size=8", f"data.corpus={corpus}", f"run.dir={folder}", f"run.name={name}"]


def array_words(jobs_folder: Path, corpus: Path, numbers: str) -> list[str]:
    """Four runs of one process, of which one has a corpus that is not there."""
    corpora = [str(corpus), str(jobs_folder / "late"), str(corpus), str(corpus)]
    vary = ["--vary", f"data.corpus={json.dumps(corpora)}", "--vary", "run.seed=[0, 1, 2, 3]", "--array", numbers]
    words = [word for word in keys(corpus, jobs_folder, "four") if not word.startswith("data.corpus")]
    return [str(CONFIG), *vary, "--cluster", str(jobs_folder / "node.yaml"), *words]


@pytest.fixture(scope="module")
def plain(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The quickstart on four processes of this machine."""
    folder = tmp_path_factory.mktemp("plain")
    assert gang.run(train_worker, [str(CONFIG), *keys(corpus, folder, "plain")], world=4) == [0] * 4
    return RunDirectory(folder / "plain")


@pytest.fixture(scope="module")
def unbroken(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, list[str]]:
    return ordeal.unbroken(gang, corpus, tmp_path_factory.mktemp("unbroken") / "run", 2)


@pytest.fixture(scope="module")
def jobs(
    cluster: Cluster,
    plain: RunDirectory,  # the corpus is then prepared
    unbroken: Any,
    corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Jobs]:
    folder = tmp_path_factory.mktemp("jobs")
    node = cluster.file(folder / "node.yaml", "n[0-1]")
    task = cluster.file(folder / "task.yaml", "n[0-1]", start="task")
    with ThreadPoolExecutor(1) as pool:
        # All four, on two processes a node and in ten orders, are in tests/verify/test_slurm.py: they take minutes.
        happenings = ("preempt", "node dies")
        generator = random.Random(3)
        hard = pool.submit(ordeal.through, cluster, corpus, folder / "hard", generator, 1, happenings=happenings)
        two = ["--nodes", "2", "--nproc", "2"]
        tasks = cluster.submit(CONFIG, *two, "--cluster", task, *keys(corpus, folder, "tasks"), OMP_NUM_THREADS="1")
        script = ["--parsable", "--nodelist=n[2-3]", f"--output={folder}/torchrun.txt", f"--chdir={ROOT}"]
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        words = [str(ROOT / "slurm" / "torchrun.sh"), str(CONFIG), *keys(corpus, folder, "torchrun")]
        torchrun = cluster.run("sbatch", *script, *words, PATH=path, PROCESSES="2", OMP_NUM_THREADS="1").strip()
        by_hand = subprocess.Popen(
            [
                *("salloc", "--nodes=2", "--nodelist=n[2-3]", "--time=5", str(BIN / "gramian"), "train", str(CONFIG)),
                *("--nproc", "2", *keys(corpus, folder, "by-hand")),
            ],
            env=environment(**cluster.variables, OMP_NUM_THREADS="1"),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        array = cluster.submit(*array_words(folder, corpus, "%2"), OMP_NUM_THREADS="1")
        assert node.exists()
        yield Jobs(folder, tasks, torchrun, array, by_hand, hard)


def ended(cluster: Cluster, job: str, log: Callable[[], str] = str) -> dict[str, str]:
    """A job's record when it has ended."""
    cluster.until(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), 150, log)
    return cluster.record(job)


def test_tasks_of_srun_and_torchrun_end_with_the_losses_of_one_machine(
    cluster: Cluster, jobs: Jobs, plain: RunDirectory
) -> None:
    """Two nodes of two processes, beside four processes here; the two jobs are on the same nodes at the same time."""
    log = jobs.run("tasks").path / "slurm" / "0000" / f"log-{jobs.tasks}.txt"
    records = [ended(cluster, jobs.tasks, log.read_text), ended(cluster, jobs.torchrun)]
    texts = [log.read_text(), (jobs.folder / "torchrun.txt").read_text()]
    for record, text in zip(records, texts, strict=True):
        assert record["JobState"] == "COMPLETED", text
    assert max(r["StartTime"] for r in records) < min(r["EndTime"] for r in records)
    for name, text in zip(("tasks", "torchrun"), texts, strict=True):
        assert worst_difference(jobs.run(name), plain)["loss"] < 1e-5
        assert "fsdp: 4 ranks = dp_replicate 2 x dp_shard 2\n       one replica on each machine" in text
    ports = [re.findall(r"meeting at 127\.0\.0\.1:(\d+)", text) for text in texts]
    assert len(ports[0]) == 1


def test_an_allocation_by_hand_is_known(jobs: Jobs, plain: RunDirectory) -> None:
    """`gramian train` in salloc's shell starts a launcher on each node."""
    output, _ = jobs.by_hand.communicate(timeout=150)
    assert jobs.by_hand.returncode == 0, output
    assert worst_difference(jobs.run("by-hand"), plain)["loss"] < 1e-5
    assert "one replica on each machine" in output


def test_the_job_runs_the_code_of_its_submission(jobs: Jobs) -> None:
    """And its log says so."""
    submission = jobs.run("tasks").path / "slurm" / "0000"
    (log,) = submission.glob("log-*.txt")
    (told,) = re.findall(r"start 1; code (\S+)", log.read_text())
    assert told == str(submission / "code")
    provenance = json.loads((jobs.run("tasks").path / "starts" / "0000" / "provenance.json").read_text())
    assert provenance["git_commit"] == json.loads((submission / "code" / "snapshot.json").read_text())["commit"]
    launched = (jobs.folder / "four-0" / "starts" / "0000" / "provenance.json").exists
    Cluster.until(launched, 120)


def test_one_run_of_an_array_fails_and_is_submitted_alone(cluster: Cluster, jobs: Jobs, corpus: Path) -> None:
    def rows() -> dict[str, dict[str, Any]]:
        told = json.loads(cluster.run("gramian", "slurm", "status", str(jobs.folder / "four"), "--json", "-"))
        return {row["run"]: row for row in told["runs"]}

    assert cluster.record(jobs.array)["ArrayTaskThrottle"] == "2" or "%2" in str(cluster.record(jobs.array))
    cluster.until(lambda: all(row["state"] in ("COMPLETED", "FAILED") for row in rows().values()), 150)
    first = rows()
    assert list(first) == ["four-0", "four-1", "four-2", "four-3"]
    assert [row["state"] for row in first.values()] == ["COMPLETED", "FAILED", "COMPLETED", "COMPLETED"]
    assert [row["step"] for row in first.values()] == [6, 0, 6, 6]
    text = cluster.run("gramian", "slurm", "status", str(jobs.folder / "four"))
    assert re.search(r"four-1 +.*FAILED", text)
    assert "late" in Path(first["four-1"]["log"]).read_text()
    (jobs.folder / "late").symlink_to(corpus)
    again = cluster.submit(*array_words(jobs.folder, corpus, "1"), OMP_NUM_THREADS="1")
    cluster.until(lambda: rows()["four-1"]["state"] == "COMPLETED", 90)
    second = rows()
    assert [row["job"] for row in second.values()] == [f"{jobs.array}_0", f"{again}_1"] + [
        f"{jobs.array}_{number}" for number in (2, 3)
    ]
    assert second["four-1"]["step"] == 6


def test_the_hard_case(jobs: Jobs, unbroken: tuple[RunDirectory, list[str]]) -> None:
    """The MoE quickstart under DeepSpeed is preempted, and a node dies in a save."""
    came = jobs.hard.result()
    ordeal.assert_unharmed(came, *unbroken)
    assert sorted(event["event"] for event in came.met) == ["node dies", "preempt"]
    assert "went down in the start before: fault 1 of it" in came.log
    outcome = read_outcome(came.run)
    assert outcome is not None
    assert outcome["outcome"] == "done"


def test_cancelled_jobs_save_and_stay_so(cluster: Cluster, jobs: Jobs, corpus: Path) -> None:
    """And a status of one that runs, on the way."""
    folder = jobs.folder / "cancelled"
    words = [*keys(corpus, folder, "long"), "train.steps=100000", "checkpoint.every=2000"]
    job = cluster.submit(CONFIG, "--time", "9", "--cluster", jobs.folder / "node.yaml", *words, OMP_NUM_THREADS="1")
    run = RunDirectory(folder / "long")
    cluster.until(lambda: run.read_metrics())
    text = cluster.run("gramian", "slurm", "status", str(run.path), "--lines", "2")
    assert re.search(rf"long +.* {job} +.* RUNNING +.* \d+/100000 .* 0 +.* 0:08:\d\d", text.replace("│", " ")), text
    assert f"log-{job}.txt\n" in text
    assert cluster.run("gramian", "slurm", "cancel", str(run.path)) == f"job {job}: told to save and end\n"
    ended(cluster, job)
    assert max(run.committed()) == run.read_metrics()[-1]["step"]
    log = (run.path / "slurm" / "0000" / f"log-{job}.txt").read_text()
    assert "the end: cancelled" in log
    assert int(cluster.record(job)["Restarts"]) == 0
    assert cluster.run("gramian", "slurm", "cancel", str(run.path)) == "no job of this run is waiting or running\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "mian"], "--partition mian: the cluster has none of this name; did you mean main? There are"),
        (["--gpus-per-node", "2"], "--gpus-per-node 2: a node of the default partition has 0; ask for at most that"),
        (["--nodes", "9"], "--nodes 9: the default partition has 4; ask for fewer, or another --partition"),
        (["--time", "soon"], "sbatch refused the job: Invalid --time specification"),
    ],
)
def test_what_the_cluster_has_not(
    cluster: Cluster,
    gramian: Any,
    monkeypatch: pytest.MonkeyPatch,
    corpus: Path,
    tmp_path: Path,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    batch = ["train.global_batch_size=36", "train.micro_batch_size=1"]
    code, _, error = gramian("slurm", "submit", CONFIG, *words, *keys(corpus, tmp_path, "refused"), *batch)
    assert (code, len(error.splitlines())) == (2, 1)
    assert message in error
    assert not list(tmp_path.rglob("job.sh"))
