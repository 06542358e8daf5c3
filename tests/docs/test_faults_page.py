"""The commands of docs/faults.md run, and come to what the page says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

from tests.docs.test_docs import ROOT, SMALLER, commands, gramian, shell
from tests.gang import Gang
from tests.runs import exit_code_of
from trainer.outcome import _EXIT_CODES

PAGE = ROOT / "docs" / "faults.md"


def test_commands_run(gang: Gang, tmp_path: Path, corpus: Path) -> None:
    """With less time than the page's, as the model is smaller than its too."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    limited, outcome, again, events = commands(PAGE)
    smaller = [f"data.corpus={corpus}", *SMALLER]
    words = [*shlex.split(limited.replace("=0.001", "=1e-9"))[1:], *smaller]
    assert gang.run(exit_code_of, gramian, words, str(tmp_path), world=1) == [75]
    record = json.loads(shell(outcome, tmp_path))
    assert (record["outcome"], record["exit_code"]) == ("requeue", 75)
    assert gang.run(exit_code_of, gramian, [*shlex.split(again)[1:], *smaller], str(tmp_path), world=1) == [0]
    assert json.loads(shell(outcome, tmp_path))["outcome"] == "done"
    told = [json.loads(line)["event"] for line in shell(events, tmp_path).splitlines()]
    assert len(told) == 3
    assert told[-2:] == ["save", "done"]


def test_outcomes_are_those_of_the_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {outcome: int(code) for outcome, code in rows} == _EXIT_CODES
