"""The commands of docs/slurm.md and docs/machines.md run, and what they say of jobs is what jobs do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.slurm.job import FAULTS_IN_A_ROW, FAULTS_TO_EXCLUDE
from tests.docs.test_docs import ROOT, commands, shell, with_smaller_quickstart
from tests.launch.slurm.cluster import Cluster
from trainer.config import load_config
from trainer.layout import plan_layout
from trainer.rundir import RunDirectory

PAGES = {name: ROOT / "docs" / f"{name}.md" for name in ("slurm", "machines", "killed")}


def test_commands_of_the_slurm_page(
    cluster: Cluster, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    with_smaller_quickstart(tmp_path, f"data.corpus={corpus}", "train.steps=100000", "train.micro_batch_size=1")
    done = {command: shell(command, tmp_path) for command in commands(PAGES["slurm"])}
    dry, submit, status, cancel, array, doctor = done.values()
    assert "#SBATCH --nodes=2" in dry
    assert "4 ranks = dp_replicate 2 x dp_shard 2" in dry
    (job,) = re.findall(r"^job    (\d+)$", submit, re.MULTILINE)
    assert submit.splitlines()[-1].startswith("next   gramian slurm status /")
    assert job in status
    assert cancel.startswith(f"job {job}: ")
    assert "#SBATCH --array=0-3%2" in array
    assert re.search(r"\d+ pass, \d+ warn, 0 fail", doctor)
    cluster.until(lambda: cluster.state(job) in ("CANCELLED", "FAILED", "COMPLETED"), 60)
    assert int(cluster.record(job)["Restarts"]) == 0


def test_commands_of_the_machines_page(corpus: Path, tmp_path: Path) -> None:
    with_smaller_quickstart(tmp_path, f"data.corpus={corpus}", "train.global_batch_size=16", "train.micro_batch_size=1")
    tiny = tmp_path / "configs" / "tiny.yaml"
    text = tiny.read_text().replace("corpus: python-stdlib", f"corpus: {corpus}").replace("steps: 20", "steps: 4")
    tiny.write_text(text)
    together, dry = commands(PAGES["machines"])
    assert "2 ranks = dp_replicate 2 x dp_shard 1" in shell(together.replace("configs/tiny.yaml", f"{tiny}"), tmp_path)
    assert max(RunDirectory(tmp_path / "runs" / "tiny").committed()) == 4
    assert "16 ranks = dp_replicate 2 x dp_shard 8\n       one replica on each machine" in shell(dry, tmp_path)


def test_the_plan_is_that_of_the_page() -> None:
    ((config, nproc, nnodes, expected),) = re.findall(
        r"^<!-- dry run: (\S+) --nproc (\d+) --nnodes (\d+) -->\n```text\n(.*?)^```",
        PAGES["machines"].read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    layout = plan_layout(load_config(ROOT / config, ["train.micro_batch_size=1"]), int(nproc) * int(nnodes), int(nproc))
    assert layout.describe().startswith(expected.strip())


def test_numbers_of_the_page_on_killed_jobs() -> None:
    words = {2: "twice", 3: "three"}
    text = " ".join(PAGES["killed"].read_text(encoding="utf-8").split())
    assert f"A node at which faults happened {words[FAULTS_TO_EXCLUDE]}" in text
    assert f"{words[FAULTS_IN_A_ROW]} faults in a row without a new checkpoint" in text


def test_the_states_are_drawn(tmp_path: Path) -> None:
    """All that a decision can come to, and a way to every end."""
    from tests.docs.test_drawn_spectra import load

    script = load(ROOT / "docs" / "job_states.py")
    script.draw(tmp_path / "states.png")
    assert (tmp_path / "states.png").read_bytes().startswith(b"\x89PNG")
    ends = {source for source, *_ in script.ARROWS} ^ {target for _, target, *_ in script.ARROWS}
    assert ends == {"done", "bad_input", "fault", "cancelled"}
    assert {name for arrow in script.ARROWS for name in arrow[:2]} == script.STATES.keys()


def test_the_evidence_of_the_page_on_killed_jobs() -> None:
    figures = json.loads((ROOT / "docs" / "evidence" / "slurm.json").read_text(encoding="utf-8"))["figures"]
    orders = [tuple(event["event"] for event in job["events"]) for job in figures["jobs"]]
    steps = [event["step"] for job in figures["jobs"] for event in job["events"]]
    text = " ".join(PAGES["killed"].read_text(encoding="utf-8").split())
    assert f"{len(orders)} jobs met these 4 in {len(set(orders))} different orders, at steps from" in text
    assert f"at steps from {min(steps)} to {max(steps)}, and every one ended with the same bits" in text
    assert {frozenset(order) for order in orders} == {frozenset(orders[0])}
    assert len(orders[0]) == 4
    assert (figures["bits_that_differ"], figures["links_of_the_chain_that_differ"]) == (0, 0)
    assert [job["left_behind"] for job in figures["jobs"]] == [0] * len(orders)
