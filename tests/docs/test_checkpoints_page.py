"""The commands of docs/checkpoints.md run, and its list of keys is whole. Its snippet is run by test_docs.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT, commands, with_smaller_quickstart, without_starting
from tests.gang import Gang
from trainer.config import CheckpointConfig
from trainer.rundir import RunDirectory

PAGE = ROOT / "docs" / "checkpoints.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Like the checkout, with the smaller quickstart config."""
    words = ("train.sample_prompt=null", f"data.corpus={corpus}")
    return with_smaller_quickstart(tmp_path_factory.mktemp("checkpoints-page"), *words)


def test_commands_run(gang: Gang, folder: Path) -> None:
    train, show, verify = commands(PAGE)
    without_starting(gang, re.sub(r"keep_every=\d+", "keep_every=5", train), folder)
    listed = without_starting(gang, show, folder)
    assert [line.split()[1] for line in listed.splitlines() if " committed " in line] == ["4", "5", "6"]
    assert "3 checkpoints" in without_starting(gang, verify, folder)
    events = RunDirectory(folder / "runs" / "quickstart").events.read()
    save = next(event for event in events if event["event"] == "save")
    assert {"seconds", "bytes", "stall_seconds"} <= set(save)


def test_every_key_of_saving_is_in_the_table() -> None:
    keys = {field.alias or name for name, field in CheckpointConfig.model_fields.items()}
    named = set(re.findall(r"^\| `checkpoint\.(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M))
    assert named == keys - {"async", "resume", "load_optimizer"}


def test_figures_are_those_of_the_evidence() -> None:
    text = PAGE.read_text(encoding="utf-8")
    evidence = json.loads((ROOT / "docs" / "evidence" / "checkpoint-damage.json").read_text())["figures"]
    assert evidence["loaded"] == 0
    assert f"Every one of {evidence['flipped_bits']} flipped bits" in text
