"""The figures of docs/optimizers.md are those of the evidence."""

from __future__ import annotations

import json
import re

from tests.docs.test_docs import ROOT

PAGE = ROOT / "docs" / "optimizers.md"


def test_learning_rates_of_the_page() -> None:
    """And the evidence's best are those of configs/optim/, inside their grids."""
    text = PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- learning rates -->\n(.*?)<!-- end -->", text, re.DOTALL)
    figures = json.loads((ROOT / "docs" / "evidence" / "optimizers-lr.json").read_text())["figures"]
    rows = re.findall(r"^\| `(\w+)`, lr ([\d.]+) \| (.*) \|$", table, re.MULTILINE)
    assert {name for name, _, _ in rows} == set(figures)
    for name, lr, losses in rows:
        of = figures[name]
        assert [f"{loss:.2f}" for loss in of["eval_loss"]] == losses.split(" | ")
        assert float(lr) == of["best"] == of["config"] == of["lr"][2]


def test_paired_seeds_of_the_page() -> None:
    """And what it says of who is below AdamW by more than three standard errors."""
    text = PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- seeds -->\n(.*?)<!-- end -->", text, re.DOTALL)
    figures = json.loads((ROOT / "docs" / "evidence" / "optimizers.json").read_text())["figures"]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) ?\|$", table, re.MULTILINE)
    assert {name for name, _, _ in rows} == set(figures)
    for name, losses, below in rows:
        of = figures[name]
        assert [f"{loss:.3f}" for loss in of["eval_loss"]] == losses.split(", ")
        if name in ("muon", "soap"):
            assert f"{of['below_adamw']:.3f} ± {of['standard_error']:.3f}" == below
            assert of["below_adamw"] > 3 * of["standard_error"]
