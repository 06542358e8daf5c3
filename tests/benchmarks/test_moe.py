"""The benchmark of experts runs, over layers that agree; what it measures is not asserted."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.benchmarks.scripts import printed


def test_moe_benchmark_prints_rates_and_their_ratio(tmp_path: Path) -> None:
    """Every implementation that `transformers` has for a CPU; DeepSpeed's too where that is installed."""
    report = tmp_path / "report.json"
    output = printed("moe.py", "--shape", "32x16x8x4x2", "--rounds", "2", "--json", str(report))
    peers = [f"{kind}, {way}" for kind in ("mixtral", "qwen3") for way in ("eager", "grouped_mm", "batched_mm")]
    for name in ("gramian", *peers, "dense MLP"):
        assert re.search(rf"^{name} +[\d,]+ tokens/s +[\d.]+% of the matmul rate$", output, re.M), name
    assert re.search(r"^ratio +\d+\.\d{3} to .+ \(\d+\.\d{3} to \d+\.\d{3}\)$", output, re.M)
    assert re.search(r"^routing and dispatch +-?[\d.]+% of a step$", output, re.M)
    (shape,) = json.loads(report.read_text())["shapes"]
    assert shape["shape"] == "32x16x8x4x2"
    assert shape["best_peer"] in shape["tokens_per_second"]
