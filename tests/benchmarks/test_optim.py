"""The benchmark of rules for matrices runs, over peers that make the same updates; what it measures is not asserted."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.benchmarks.scripts import printed

RULES = ("muon", "shampoo", "shampoo of the paper", "soap")


def test_optim_benchmark_prints_times_ratios_and_shares(tmp_path: Path) -> None:
    """Of torch's Muon on one rank and two; those of other packages too where they are installed."""
    report = tmp_path / "report.json"
    output = printed("optim.py", "--shape", "1x8x16", "--rounds", "1", "--batch", "4x16", "--json", str(report))
    for ranks in ("1 rank", "2 ranks"):
        for rule in RULES:
            assert re.search(rf"^{rule}, 1x8x16, {ranks}\n  gramian +[\d.]+ ms a step$", output, re.M), (rule, ranks)
    assert len(re.findall(r"^  torch +[\d.]+ ms a step$", output, re.M)) == 2
    assert len(re.findall(r"^  ratio +[\d.]+ to .+ \([\d.]+ to [\d.]+\)$", output, re.M)) >= 2
    for name in ("adamw", "muon", "shampoo", "soap"):
        assert re.search(rf"^  {name} +[\d.]+ of +[\d.]+ ms: +[\d.]+% of the step$", output, re.M), name
    figures = json.loads(report.read_text())
    assert [(race["ranks"], race["rule"]) for race in figures["races"]] == [(n, rule) for n in (1, 2) for rule in RULES]
    for race in figures["races"]:
        assert set(race["milliseconds"]) >= ({"gramian", "torch"} if race["rule"] == "muon" else {"gramian"})
    assert all(0 < numbers["share"] < 1 for numbers in figures["share_of_step"].values())
