"""The commands of docs/sweeps.md run, and its figures are those of the evidence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import read_tree
from tests.docs.test_docs import ROOT, blocks, commands, gramian
from tests.scaling.data import synthetic

PAGE = ROOT / "docs" / "sweeps.md"
TINY, CPU = (ROOT / "configs" / "sweeps" / f"{name}.yaml" for name in ("tiny", "cpu-isoflop"))
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Like the checkout, with a smaller sweep, and with records of others."""
    folder = tmp_path_factory.mktemp("sweeps-page")
    (folder / "configs" / "sweeps").mkdir(parents=True)
    (folder / "configs" / "tiny.yaml").write_bytes((ROOT / "configs" / "tiny.yaml").read_bytes())
    tree = read_tree(TINY)
    tree["overrides"] |= {"data.corpus": str(corpus)}
    tree["budgets"] = {"flops": [2e9, 4e9]}
    (folder / "configs" / "sweeps" / "tiny.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    points = synthetic(noise=0.005, sizes=9, budgets=7)
    rows = [f"{n:.8g},{d:.8g},{loss:.8g}" for n, d, loss in zip(points.params, points.tokens, points.loss, strict=True)]
    text = "\n".join(["n_params,n_tokens,final_loss", *rows]) + "\n"
    (folder / "records.csv").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[str, str]:
    done = {}
    for command in commands(PAGE):
        program, *words = command.split()
        assert program == "gramian"
        quick = ["--bootstrap", "40"] if words[1] in ("fit", "predict", "report") else []
        done[command] = gramian([*words, *quick], str(folder))
    return done


def test_commands_run(outputs: dict[str, str], folder: Path) -> None:
    assert len(outputs) == 7
    shown = list(outputs.values())
    assert "6 of 6 runs left" in shown[0]
    assert "next     gramian sweep report" in shown[1]
    assert "6 done" in shown[2]
    assert "alpha" in shown[4]
    assert "tokens per parameter" in shown[5]
    assert (folder / "report" / "report.html").exists()


def test_the_sweeps_folder_is_that_of_the_page(outputs: dict[str, str], folder: Path) -> None:
    (listing,) = re.findall(r"^    sweeps/tiny/\n((?:      .*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {line.split()[0].strip("/") for line in listing.splitlines()}
    assert named == {path.name for path in (folder / "sweeps" / "tiny").iterdir() if path.name != ".lock"}


def test_the_sweep_of_the_page_is_that_of_the_file() -> None:
    (block,) = blocks(PAGE, "yaml-sweep")
    shown, real = yaml.safe_load(block), read_tree(CPU)
    del real["variants"]["muon"]["optim.adamw"]  # too long for the page
    assert shown == real


def evidence(name: str) -> dict[str, Any]:
    """What a long test wrote; empty if it never ran."""
    file = ROOT / "docs" / "evidence" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))["figures"] if file.exists() else {}


def coverage() -> list[str]:
    found = evidence("scaling-coverage")
    if not found:
        return []
    alpha, beta = (found["covered"][name] for name in ("alpha", "beta"))
    halves = [found["half_width"][name] for name in ("alpha", "beta")]
    return [
        f"On {found['draws']} synthetic data sets with 1% noise of the loss the 95% intervals cover the true α in",
        f"{alpha:.1%} and β in {beta:.1%}, at median half-widths of {halves[0]:.3f} and {halves[1]:.3f}",
        "([evidence/scaling-coverage.json](evidence/scaling-coverage.json)). One fit of the 245 records from all its",
        f"starts took {found['fit_cpu_seconds']:.1f} s of one core, 1000 bootstraps "
        f"{found['bootstrap_cpu_seconds']:.0f} s.",
    ]


def cpu() -> list[str]:
    found = evidence("cpu-isoflop")
    if not found:
        return []
    rows = [
        "Predicted from the three smaller budgets before the largest one was run, the least loss of that budget and",
        "the loss of each of its runs, the latter with the noise of a run",
        "([evidence/cpu-isoflop.json](evidence/cpu-isoflop.json), written by `make verify` in "
        f"{found['minutes']:.0f} minutes):",
        "",
        "| what | predicted | 95% | came out | miss |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    least = [(f"{name}, least", one["loss"], one["observed"]) for name, one in found["least"].items()]
    for name, said, observed in (*least, *((run["name"], run, run["observed"]) for run in found["held_out"])):
        rows.append(
            f"| {name} | {said['value']:.4f} | {said['low']:.4f} to {said['high']:.4f} | {observed:.4f} "
            f"| {said['value'] / observed - 1:+.2%} |"
        )
    ratio = found["multiplier"]
    return [
        *rows,
        "",
        f"AdamW needs {ratio['value']:.2f} times the compute ({ratio['low']:.2f} to {ratio['high']:.2f}) for the loss",
        "that Muon reaches at the largest budget.",
    ]


@pytest.mark.parametrize("figures", [coverage, cpu])
def test_figures_of_the_page(figures: Callable[[], list[str]]) -> None:
    """Between its markers each stands as the evidence has it; nothing, where there is none yet."""
    text = PAGE.read_text(encoding="utf-8")
    (shown,) = re.findall(rf"^<!-- {figures.__name__} -->\n(.*?)^<!-- end -->", text, re.MULTILINE | re.DOTALL)
    expected = "".join(line + "\n" for line in figures())
    assert shown == expected, f"it is now\n{expected}"
