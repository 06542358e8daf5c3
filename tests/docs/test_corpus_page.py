"""The commands of docs/corpus.md run, and do what the page says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from data.dataset import Dataset
from tests.docs.test_docs import ROOT, SMALLER, commands, without_starting
from tests.gang import Gang
from trainer.rundir import RunDirectory

PAGE = ROOT / "docs" / "corpus.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus-page")
    shutil.copytree(ROOT / "configs", folder / "configs")
    return folder


@pytest.fixture(scope="module")
def outputs(gang: Gang, folder: Path, corpus: Path) -> dict[str, str]:
    """Output of every command, run in the page's order on the small corpus and, to train, as the quickstart's test."""
    done = {}
    for command in commands(PAGE):
        smaller = command.replace("python-stdlib", str(corpus)).replace("--vocab-size 4096", "--vocab-size 600")
        if command.startswith("gramian tokenize "):
            smaller += " --eval-fraction 0.5"  # of twelve documents a fiftieth would be none
        if command.startswith("gramian train "):
            smaller = " ".join([smaller, *(word for word in SMALLER if not word.startswith("data.tokenizer"))])
        done[command] = without_starting(gang, smaller, folder)
    return done


def test_commands_run(outputs: dict[str, str], folder: Path) -> None:
    assert len(outputs) == 8
    assert (folder / "lengths.png").is_file()
    (verified,) = (output for command, output in outputs.items() if command.startswith("gramian data verify"))
    assert "all as written" in verified
    rows = RunDirectory(folder / "runs" / "corpus").read_metrics()
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_parts_are_merged(outputs: dict[str, str], folder: Path) -> None:
    counts = []
    for name in ("tokens", "by-parts"):
        splits = json.loads((folder / name / "manifest.json").read_text())["splits"]
        counts.append({split: {what: splits[split][what] for what in ("documents", "tokens")} for split in splits})
    assert counts[0] == counts[1]


def test_adopted_files_are_those_of_the_folder(outputs: dict[str, str], folder: Path) -> None:
    ours, adopted = Dataset.open(folder / "tokens"), Dataset.open(folder / "adopted")
    assert adopted.data_hash == ours.data_hash
    for split in ("train", "eval"):
        theirs, mine = (dataset.manifest["splits"][split] for dataset in (adopted, ours))
        assert {what: theirs[what] for what in ("documents", "tokens", "bytes")} == {
            what: mine[what] for what in ("documents", "tokens", "bytes")
        }


def test_listing_is_what_is_there(outputs: dict[str, str], folder: Path) -> None:
    (listing,) = re.findall(r"^    tokens/\n((?:      .*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {line.split()[0] for line in listing.splitlines() if line[6] != " "}
    there = {path.name for path in (folder / "tokens").iterdir() if path.name != ".lock"}
    assert there <= named
    assert there >= {"manifest.json", "tokenizer.model", "train-00000.bin", "train-00000.idx"}
