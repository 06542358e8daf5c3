"""The commands of docs/moe.md run, and its figures are those of the evidence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import apply_overrides, read_tree
from data.tokenizers.byte import ByteTokenizer
from models.flops import parameter_counts
from tests.docs.test_docs import ROOT, SMALLER, commands, shell, without_starting
from tests.gang import Gang
from trainer.config import load_config
from trainer.rundir import RunDirectory

PAGE, CONFIG = ROOT / "docs" / "moe.md", ROOT / "configs" / "moe-quickstart.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Like the checkout, with a smaller config."""
    folder = tmp_path_factory.mktemp("moe-page")
    (folder / "docs").symlink_to(ROOT / "docs")
    (folder / "configs").mkdir()
    smaller = [key for key in SMALLER if "vocab_size" not in key]
    four_ranks = "train.micro_batch_size=1"  # the batch has a row for each
    tree = apply_overrides(read_tree(CONFIG), [*smaller, four_ranks, f"data.corpus={corpus}"])
    (folder / "configs" / CONFIG.name).write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def outputs(gang: Gang, folder: Path) -> dict[str, str]:
    return {
        command: without_starting(gang, command, folder) if command.startswith("gramian ") else shell(command, folder)
        for command in commands(PAGE)
    }


def test_commands_run(outputs: dict[str, str], folder: Path) -> None:
    assert len(outputs) == 5
    (dry,) = (output for command, output in outputs.items() if "--dry-run" in command)
    assert "experts: dp_replicate 1 x efsdp 2 x ep 2" in dry
    (certified,) = (output for command, output in outputs.items() if "certify" in command)
    assert "certified: 1 step on 2 ranks equal one plain process" in certified
    assert (folder / "experts.png").read_bytes().startswith(b"\x89PNG")


def test_every_number_of_the_log_is_named(outputs: dict[str, str], folder: Path) -> None:
    """What a row has because of experts, and nothing else, is in the page's table."""
    (sparse, dense) = (
        set(RunDirectory(folder / "runs" / name).read_metrics()[0]) for name in ("moe-quickstart", "dense")
    )
    named = re.findall(r"^\| (`[^|]*) \| ", PAGE.read_text(encoding="utf-8").split("## What is logged")[1], re.M)
    assert {key for cell in named for key in re.findall(r"`(\w+)`", cell)} == sparse - dense


def test_the_two_models_use_as_many_parameters() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (keys,) = (command.split()[3:] for command in commands(PAGE) if "run.name=dense" in command)
    vocab = ByteTokenizer.vocab_size
    sparse, dense = (load_config(CONFIG, words).model.with_vocab_size(vocab) for words in ([], keys))
    counts, of_dense = parameter_counts(sparse), parameter_counts(dense)
    assert 1.0 < counts["active"] / of_dense["active"] < 1.01
    for number in (counts["total"], counts["active"], of_dense["active"]):
        assert f"{number:,}" in text


def evidence(name: str) -> dict[str, Any]:
    """What a long test wrote; empty if it never ran."""
    file = ROOT / "docs" / "evidence" / f"{name}.json"
    return json.loads(file.read_text())["figures"] if file.exists() else {}


def balance() -> list[str]:
    ways = evidence("moe-balance")["largest load over mean"]
    rows = ["| balanced by | over two seeds |", "| --- | --- |"]
    return rows + [f"| {way} | {min(loads):.2f} to {max(loads):.2f} |" for way, loads in ways.items()]


def quickstart() -> list[str]:
    runs = evidence("moe-quickstart")
    if not runs:
        return []
    sparse, dense = (runs[name]["eval_loss"] for name in ("experts", "dense"))
    seeds = runs["experts"]["seeds"]
    loads = [runs["experts"][key] for key in ("smallest_load", "largest_load")]
    ahead = [d - s for s, d in zip(sparse, dense, strict=True)]
    return [
        "Loss on the held-out documents at the end, nats per token",
        "([evidence/moe-quickstart.json](evidence/moe-quickstart.json)):",
        "",
        f"| | {' | '.join(f'seed {seed}' for seed in seeds)} |",
        f"| --- |{' ---: |' * len(seeds)}",
        *(
            f"| {name} | {' | '.join(f'{x:.3f}' for x in losses)} |"
            for name, losses in (("experts", sparse), ("dense", dense), ("experts are ahead by", ahead))
        ),
        "",
        f"In the second half of the steps an expert had between {loads[0]:.2f} and {loads[1]:.2f} of its layer's mean",
        "load, in every layer, logged step and run.",
    ]


def speed() -> list[str]:
    measured = evidence("moe-speed")
    if not measured:
        return []
    rows = [
        f"With {measured['threads']} threads on CPU cores, medians of {measured['rounds']} rounds in turn",
        "([evidence/moe-speed.json](evidence/moe-speed.json)):",
        "",
        "| tokens x width x expert's width x experts x of a token | best peer | our rate over it | of the matmul rate "
        "| time over the dense MLP's |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for shape in measured["shapes"]:
        share, longer = shape["share_of_matmul_rate"]["gramian"], 1 / (1 - shape["share_of_routing"])
        rows.append(f"| {shape['shape']} | {shape['best_peer']} | {shape['ratio']:.2f} | {share:.0%} | {longer:.2f} |")
    return rows


@pytest.mark.parametrize("figures", [balance, quickstart, speed])
def test_figures_of_the_page(figures: Callable[[], list[str]]) -> None:
    """Between its markers each stands as the evidence has it; nothing, where there is none yet."""
    text = PAGE.read_text(encoding="utf-8")
    (shown,) = re.findall(rf"^<!-- {figures.__name__} -->\n(.*?)^<!-- end -->", text, re.MULTILINE | re.DOTALL)
    expected = "".join(line + "\n" for line in figures())
    assert shown == expected, f"it is now\n{expected}"
