"""The commands of docs/deepspeed.md run, and its table is that of the evidence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from tests.docs.test_docs import ROOT, commands, with_smaller_quickstart, without_starting
from tests.gang import Gang
from tests.runs import read_state
from trainer.manifest import read_trainer_state
from trainer.rundir import RunDirectory, find_checkpoint

PAGE = ROOT / "docs" / "deepspeed.md"


def test_commands_run(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """Both runs give the same losses, and what came back from the universal format is what went there."""
    adamw = ["optim={name: adamw, lr: 0.001}", "train.sample_prompt=null"]
    folder = with_smaller_quickstart(tmp_path, f"data.corpus={corpus}", *adamw)
    words = commands(PAGE)
    assert len(words) == 4
    for command in words:
        without_starting(gang, command, folder)
    zero, given = (RunDirectory(folder / "runs" / name) for name in ("zero", "json"))
    losses = [[row["loss"] for row in run.read_metrics() if "loss" in row] for run in (zero, given)]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]
    checkpoint, back = find_checkpoint(zero.path), folder / "runs" / "back"
    assert read_trainer_state(back)["step"] == 6
    before, after = read_state(checkpoint), read_state(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def memory() -> list[str]:
    record = json.loads((ROOT / "docs" / "evidence" / "zero-memory.json").read_text())
    whens = ("between micro-batches", "at the update", "between steps")
    rows = [f"| | {' | '.join(whens)} |", "| --- | ---: | ---: | ---: |"]
    for name, of in record["figures"].items():
        engine = "`fsdp`" if name == "fsdp" else f"`deepspeed`, stage {name}"
        rows.append(f"| {engine} | {' | '.join(f'{of[when]:.1f}' for when in whens)} |")
    return rows


def test_memory_of_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- memory -->\n(.*?)<!-- end -->", text, re.DOTALL)
    table = "\n".join(line for line in block.splitlines() if line.startswith("|"))
    assert table == "\n".join(memory()), "\n".join(memory())
