"""What a job's script decides, and what a task knows of its place."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from launch.slurm import job, step
from launch.slurm.job import History, _state, decide, run_step


@pytest.mark.parametrize(
    ("outcome", "code", "state", "restarts", "expected"),
    [
        ("done", 0, "RUNNING", 0, (False, 0)),
        ("requeue", 75, "RUNNING", 0, (True, 75)),
        ("requeue", 75, "TIMEOUT", 0, (True, 75)),
        ("requeue", 75, "CANCELLED", 0, (False, 75)),
        ("requeue", 75, "RUNNING", 3, (False, 75)),  # often enough
        ("bad_input", 2, "RUNNING", 0, (False, 2)),
        ("hang", 70, "RUNNING", 0, (True, 70)),
        ("fault", 1, "RUNNING", 0, (False, 1)),
        ("retry", 1, "RUNNING", 0, (True, 1)),  # a fault that may not come again
        ("fault", 137, "RUNNING", 0, (True, 137)),  # a task was killed, and the others failed for want of it
        (None, 137, "RUNNING", 0, (True, 137)),
        (None, 1, "RUNNING", 3, (False, 1)),
        ("done", 1, "RUNNING", 0, (False, 1)),
    ],
)
def test_decisions(outcome: str | None, code: int, state: str, restarts: int, expected: tuple[bool, int]) -> None:
    record: dict[str, Any] | None = {"outcome": outcome, "reason": "why"} if outcome is not None else None
    if outcome == "retry":
        record = {"outcome": "fault", "reason": "why", "retry": True}
    after = decide(record, code, state, restarts, 3, cancelled=False)
    assert (after.requeue, after.exit_code) == expected
    assert not decide(record, code, state, restarts, 3, cancelled=True).requeue


def test_nodes_that_fail_twice_are_excluded(tmp_path: Path) -> None:
    """Whether they were seen to fail, or found to have gone down in a start that was cut off."""
    fault, stop = job.After(True, 1, "", fault=True), job.After(True, 75, "")
    first = History(tmp_path)
    assert first.begin(["a", "b"]) == []
    assert not first.end(fault, step=5, node="a")
    assert History(tmp_path).excluded == []
    second = History(tmp_path)
    second.begin(["a", "b"])
    assert not second.end(fault, step=9, node="a")
    assert History(tmp_path).excluded == ["a"]
    third = History(tmp_path)
    third.begin(["b", "c"])
    assert not third.end(stop, step=9, node=None)
    assert History(tmp_path).faults == {"a": 2}


def test_a_node_that_went_down_is_blamed_by_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_went_down", lambda node, since: node == "b")
    History(tmp_path).begin(["a", "b"])  # has no end
    after = History(tmp_path)
    assert after.begin(["a", "c"]) == ["b"]
    assert after.faults == {"b": 1}


def test_faults_in_a_row_at_the_same_checkpoint_are_enough(tmp_path: Path) -> None:
    fault, stop = job.After(True, 1, "", fault=True), job.After(True, 75, "")
    ends = [(fault, 5), (fault, 5), (stop, 5), (fault, 5), (fault, 5), (fault, 7), (fault, 7), (fault, 7)]
    given_up = [History(tmp_path).end(after, at, None) for after, at in ends]
    assert given_up == [False] * 7 + [True]


def test_exit_codes_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)}
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(job, "slurm", lambda *words: told.append(words))
    try:
        assert run_step(["bash", "-c", "exit 7"], "12") == 7
        assert run_step(["bash", "-c", "kill -9 $$"], "12") == 137
        # A signal to the script is the step's to heed; SIGTERM is there already.
        assert run_step(["bash", "-c", f"kill -USR1 {os.getpid()}; kill {os.getpid()}; sleep 1"], "12") == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert told == [("scancel", "--signal=USR1", "12")]


TASK = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}


def test_places_of_tasks() -> None:
    assert step.read_step({}) is None
    assert step.read_step(TASK | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    found = step.read_step(TASK)
    assert found == step.Step(4, 2, 3, 1, 1, 2)
    assert not found.starts_workers
    launchers = step.read_step(TASK | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"})
    assert launchers is not None
    assert launchers.starts_workers
    uneven = step.read_step(TASK | {"SLURM_STEP_TASKS_PER_NODE": "3,1"})
    assert uneven is not None
    assert uneven.on_a_node is None


@pytest.mark.parametrize(("visible", "local_rank"), [("", "1"), ("0,1", "1"), ("1", "0")])
def test_a_task_becomes_a_rank(monkeypatch: pytest.MonkeyPatch, visible: str, local_rank: str) -> None:
    """A task that sees one GPU has it by the number 0."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
    found = step.read_step(TASK)
    assert found is not None
    found.become_rank({"GRAMIAN_RDZV": "[::1]:29400", "CUDA_VISIBLE_DEVICES": visible})
    assert [os.environ[name] for name in names[:-1]] == ["3", "4", local_rank, "2", "::1", "29400"]


def test_what_is_started_in_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    inside = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2"}
    words = step.step_to_start(inside, 4, "train", ["c.yaml", "a=b c"])
    assert words is not None
    assert words[:3] == ["srun", "--nodes=2", "--ntasks=2"]
    assert words[-5:] == ["train", "--nproc", "4", "c.yaml", "a=b c"]
    assert step.step_to_start({}, None, "train", []) is None
    assert step.step_to_start(inside | {"SLURM_JOB_NUM_NODES": "1"}, None, "train", []) is None
    assert step.step_to_start(inside | {"SLURM_STEP_ID": "0"}, None, "train", []) is None


def test_ports_of_jobs() -> None:
    """One that is taken is passed over, and jobs near one another are apart."""
    first = [step.candidate_ports(number)[0] for number in range(1000, 1200)]
    assert len(set(first)) == len(first)
    assert all(20_000 <= port < 32_000 for number in (1, 2**31) for port in step.candidate_ports(number))
    ports = step.candidate_ports(77)
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::", ports[0]))
        holder.listen()
        assert step.free_port(77) in ports[1:]


def test_addresses_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's own address of a node comes before its name, which need not resolve."""
    monkeypatch.setattr(step, "show_node", lambda node: {"NodeAddr": "10.1.2.3", "NodeHostName": "x.invalid"})
    assert step.address_of("n0.invalid") == "10.1.2.3"
    monkeypatch.setattr(step, "show_node", lambda node: {"NodeAddr": "n0.invalid", "NodeHostName": "x.invalid"})
    with pytest.raises(UserError, match=r"none of n0\.invalid, x\.invalid resolves; give its address as GRAMIAN_RDZV"):
        step.address_of("n0.invalid")
    monkeypatch.setattr(step, "show_node", lambda node: {"NodeAddr": "fd00::7"})
    assert step.shown_address(step.address_of("n0"), 20_000) == "[fd00::7]:20000"


def test_a_time_limit_is_known_while_nodes_are_cleared() -> None:
    """SLURM requeues what is preempted by itself, and what is out of time not (tests/launch/slurm/test_limit.py)."""
    assert _state({"JobState": "COMPLETING", "Reason": "TimeLimit"}) == "TIMEOUT"
    assert _state({"JobState": "COMPLETING", "Reason": "None"}) == "COMPLETING"
    assert _state({"JobState": "RUNNING", "Reason": "None"}) == "RUNNING"
