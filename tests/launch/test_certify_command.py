"""`gramian certify` as a user runs it: real processes, what is printed, exit codes, wrong input."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.launch.commands import BIN, assert_refused, command
from tests.runs import TINY

SMALL = ("data.seq_len=16", "train.global_batch_size=8", "train.micro_batch_size=2")

# Python runs a `sitecustomize` at its start: in workers this one lets gradients be counted twice.
_HOOK = """
import os

if "RANK" in os.environ:
    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor
    FSDPModule.set_gradient_divide_factor = lambda module, factor: divide(module, factor / 2)
"""


def words(corpus: Path, *more: str) -> list[str]:
    return ["certify", TINY, f"data.corpus={corpus}", *SMALL, *more]


def left_behind() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("gramian-certify-*"))


def test_certifies_and_tells_the_worst(corpus: Path, tmp_path: Path) -> None:
    before = left_behind()
    report = tmp_path / "report.json"
    result = command(*words(corpus, "--nproc", "2", "--steps", "2", "--json", str(report)), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "mesh   fsdp: 2 ranks" in result.stdout
    assert "certified: 2 steps on 2 ranks equal one plain process" in result.stdout
    record = json.loads(report.read_text())
    assert record["passed"] is True
    assert (record["steps"], record["world_size"]) == (2, 2)
    rows = record["rows"]
    worst = max(row["difference"] / row["allowed"] for row in rows if row["allowed"])
    assert rows[0]["difference"] / rows[0]["allowed"] == worst
    assert {row["quantity"] for row in rows} >= {"loss", "gradient norm", "initial weight", "gradient", "update"}
    if rows[0]["parameter"]:
        assert rows[0]["parameter"] in result.stdout
    # Nothing else is left: no run directory, no logs.
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert left_behind() == before


def test_a_difference_is_told_in_one_line_with_exit_code_1(corpus: Path, tmp_path: Path) -> None:
    before = left_behind()
    (tmp_path / "sitecustomize.py").write_text(_HOOK)
    result = command(*words(corpus, "--nproc", "2", "--steps", "1"), PYTHONPATH=str(tmp_path))
    assert result.returncode == 1, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("gramian: not certified: ")
    assert "differs by 1 at step 1, allowed " in line
    assert "FAILED" in result.stdout
    assert "certified: " not in result.stdout
    assert left_behind() == before


def test_json_alone_on_standard_output(corpus: Path) -> None:
    result = command(*words(corpus, "--steps", "1", "--json", "-"))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["passed"] is True
    assert "certified: 1 step on 1 rank equal" in result.stderr


def test_repeat(corpus: Path) -> None:
    result = command(*words(corpus, "--nproc", "2", "--steps", "2", "--repeat", "train.deterministic=true"))
    assert result.returncode == 0, result.stderr
    assert "repeatable: 2 steps twice, the same bits" in result.stdout


@pytest.mark.verify
def test_under_torchrun(corpus: Path) -> None:
    launcher = ["--standalone", "--nproc-per-node", "2", "--no-python", str(BIN / "gramian")]
    arguments = [*launcher, *words(corpus, "--steps", "1")]
    result = command(*arguments, program="torchrun")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("certified: 1 step on 2 ranks") == 1


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--nproc", "3"], ["train.global_batch_size", "3 processes", "set train.global_batch_size=12"]),
        (["--nproc", "2", "parallel.dp_replicate=4"], ["parallel.dp_replicate", "choose one of [1, 2]"]),
        (["--json", "/no/such/folder/report.json"], ["--json /no/such/folder/report.json", "cannot be written"]),
        (["train.presicion=fp16"], ["unknown key", "did you mean 'train.precision'?"]),
        (["--stesp", "3"], ["--stesp", "gramian certify --help"]),
    ],
)
def test_wrong_input(corpus: Path, more: list[str], parts: list[str]) -> None:
    assert_refused(command(*words(corpus, *more)), *parts)
