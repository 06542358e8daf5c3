"""The commands of docs/exchange.md run, and do what the page says."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
from pathlib import Path

import pytest

from common.config import read_tree
from models.families import FAMILIES
from tests.docs.test_docs import ROOT, blocks, commands, with_smaller_quickstart, without_starting
from tests.gang import Gang
from trainer.exchange import initial
from trainer.exchange.tokenizers import ORIGINAL
from trainer.rundir import RunDirectory

PAGE = ROOT / "docs" / "exchange.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return with_smaller_quickstart(tmp_path_factory.mktemp("exchange-page"), f"data.corpus={corpus}")


@pytest.fixture(scope="module")
def outputs(gang: Gang, folder: Path, corpus: Path) -> dict[str, str]:
    """Output of every command, in the page's order."""
    done = {}
    for command in commands(PAGE):
        smaller = command.replace("python-stdlib", str(corpus)).replace("seq_len: 256", "seq_len: 32")
        if command.startswith("gramian tokenize "):
            smaller += " --eval-fraction 0.5"  # of twelve documents a fiftieth would be none
        done[command] = without_starting(gang, smaller, folder)
    return done


def test_commands_run(outputs: dict[str, str], folder: Path) -> None:
    assert len(outputs) == 7
    assert not (folder / "elsewhere").exists()
    sizes = json.loads((folder / "sizes.json").read_text())
    assert sizes["parameters"] > 10_000
    (generated,) = (output for command, output in outputs.items() if command.startswith("gramian generate"))
    assert generated.startswith("def")
    (trained,) = (output for command, output in outputs.items() if "init_from" in command)
    assert "initial weights from quickstart-hf" in trained


def test_continued_training_begins_where_the_run_ended(outputs: dict[str, str], folder: Path) -> None:
    losses = {
        name: [row["loss"] for row in RunDirectory(folder / "runs" / name).read_metrics() if "loss" in row]
        for name in ("quickstart", "continued")
    }
    assert losses["continued"][0] < losses["quickstart"][0] - 0.01
    config = read_tree(folder / "runs" / "continued" / "config.yaml")
    assert config["model"]["init_from"] == "quickstart-hf"
    assert config["model"]["d_model"] == 32


def test_snippet_reads_the_folder(outputs: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = blocks(PAGE, "python")
    (folder / "snippet.py").write_text(snippet)
    with contextlib.chdir(folder):
        runpy.run_path("snippet.py")
    assert capsys.readouterr().out.startswith("def")


def test_names_of_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"`{ORIGINAL}`" in text
    (listed,) = re.findall(r"\*\*Families\*\*, by their `model_type`: (.*?); see", text, re.DOTALL)
    assert set(re.findall(r"`([^`]+)`", listed)) == set(FAMILIES)
    (free,) = re.findall(r"Free are those of training:\n(.*?)are not learned", text, re.DOTALL)
    assert {"model.init_std", "model.mup_base_width", "moe.capacity_factor", "model.max_seq_len"} == set(
        re.findall(r"`([^`]+)`", free)
    )
    balance = {"moe.aux_loss_coef", "moe.aux_loss_over", "moe.z_loss_coef", "moe.bias_update_rate"}
    assert {"init_from", "init_std", "mup_base_width", "max_seq_len", "moe.capacity_factor"} | balance == initial._FREE


def test_figures_of_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (quoted,) = re.findall(r"<!-- figures -->\n(.*?)<!-- end -->", text, re.DOTALL)
    figures = json.loads((ROOT / "docs" / "evidence" / "exchange.json").read_text())["figures"]
    export, large = figures["export in fp32"], figures["dry run of 405B from 512 ranks"]
    assert re.findall(r"([\d.]+) (?:GB|MB)", quoted) == [
        f"{export['bytes'] / 1e9:.2f}",
        f"{export['peak_bytes'] / 1e6:.0f}",
        f"{figures['largest_tensor_bytes'] / 1e6:.0f}",
        f"{large['peak_bytes'] / 1e6:.0f}",
    ]
