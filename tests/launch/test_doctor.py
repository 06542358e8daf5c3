"""What is wrong with a machine, or between ranks, is found and told with what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch import doctor
from tests.gang import Gang
from tests.runs import TINY, train_worker

Verdicts = dict[str, tuple[str, str]]


def checked(gramian: Callable[..., Any], folder: Path, code: int = 0) -> Verdicts:
    """Verdict and finding of each check, by its name."""
    ended = gramian("doctor", "--dir", folder, "--json", folder / "found.json")
    assert ended.code == code, ended.err
    found = json.loads((folder / "found.json").read_text())["checks"]
    assert all(f"{check['verdict']}" in ended.out for check in found)
    return {check["name"]: (check["verdict"], check["what"]) for check in found}


def test_a_machine_that_is_well(gramian: Callable[..., Any], tmp_path: Path) -> None:
    found = checked(gramian, tmp_path)
    names = {"versions", "GPUs", "memory", "interfaces", "name resolution", "port", "SLURM", "disk"}
    assert names <= found.keys()
    assert "torch 2." in found["versions"][1]
    assert "lo 127.0.0.1" in found["interfaces"][1]
    assert "MB/s written to the disk" in found["disk"][1]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]  # nothing is left of the trial


def test_what_is_wrong_is_told_with_a_way_out(
    gramian: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    monkeypatch.setattr(doctor, "_SLOW_DISK", 1e9)
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "no-such-host.invalid")
    found = checked(gramian, tmp_path, code=1)
    assert found["interfaces"][0] == "fail"
    assert "GLOO_SOCKET_IFNAME is ib7, which is not there; set one of lo" in found["interfaces"][1]
    assert found["disk"][0] == "warn"
    assert "choose a faster run.dir" in found["disk"][1]
    assert found["name resolution"] == (
        "warn",
        "no-such-host.invalid does not resolve here; put it into /etc/hosts or DNS, or give addresses instead of names",
    )
    ended = gramian("doctor", "--dir", tmp_path)
    assert ended.err == f"gramian: 1 of {len(found) + 1} checks fail: interfaces\n"


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("torch", "no-such-package"))
    ((name, verdict, what, _),) = doctor._versions()
    assert (name, verdict) == ("versions", "fail")
    assert what.startswith("no-such-package is not installed in ")


def test_wrong_words(gramian: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "is not a folder you may write to" in gramian("doctor", "--dir", file / "x").err
    assert "--json" in gramian("doctor", "--json", tmp_path / "absent" / "x").err


def _group(fault: str) -> list[dict[str, Any]]:
    """The checks between ranks, with something wrong on rank 1 or everywhere."""
    import time

    import torch

    from trainer import preflight
    from trainer.runtime import start_runtime

    patches = []
    if os.environ["RANK"] == "1" and fault == "version":
        patches.append(mock.patch.object(torch, "__version__", "2.0"))
    if os.environ["RANK"] == "1" and fault == "clock":
        patches.append(mock.patch.object(preflight.time, "time", return_value=time.time() + 90))
    if fault == "slow":
        patches.append(mock.patch.object(preflight, "_SLOW", {"cpu": 1e15}))
    with start_runtime() as runtime:
        for patch in patches:
            patch.start()
        try:
            found = preflight.group_checks(
                runtime, lambda: [{"name": "here", "verdict": "pass", "what": str(os.getpid())}]
            )
        finally:
            for patch in patches:
                patch.stop()
    return found


@pytest.mark.parametrize(
    ("fault", "name", "verdict", "what"),
    [
        ("none", "clocks", "pass", "ms apart at most"),
        ("version", "same versions", "fail", "give all the same environment"),
        ("clock", "clocks", "warn", "have both set by NTP"),
        ("slow", "all-to-all", "warn", "set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the fast interface"),
    ],
)
def test_what_is_between_ranks(gang: Gang, fault: str, name: str, verdict: str, what: str) -> None:
    first, second = gang.run(_group, fault, world=2)
    assert first == second  # all can go by it
    found = {check["name"]: check for check in first}
    assert found.keys() == {"here", "same versions", "clocks", "all-reduce", "all-to-all"}  # one rank of a host looks
    assert found[name]["verdict"] == verdict
    assert what in found[name]["what"]
    assert [check["name"] for check in first if check["verdict"] == "fail"] == ([name] if verdict == "fail" else [])


def _train_with_other_versions(words: list[str]) -> int:
    import torch

    if os.environ["RANK"] == "0":
        return train_worker(words)
    with mock.patch.object(torch, "__version__", "2.0"):
        return train_worker(words)


def test_a_run_with_preflight_is_refused_where_a_check_fails(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    words = [TINY, f"data.corpus={corpus}", f"run.dir={tmp_path}", "launch.preflight=true", "train.steps=1"]
    assert gang.run(_train_with_other_versions, words, world=2) == [2, 2]
    outcome = json.loads((tmp_path / "tiny" / "outcome.json").read_text())
    assert outcome["outcome"] == "bad_input"
    assert outcome["reason"].startswith("preflight: same versions: torch ")
    assert not (tmp_path / "tiny" / "checkpoints").exists()
