"""Step time of rules for matrices beside peers: `benchmarks/optim.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify.evidence import ROOT, write_evidence

pytestmark = [pytest.mark.verify, pytest.mark.timeout(14_400)]


def test_as_fast_as_peers(tmp_path: Path) -> None:
    """Each rule is at least as fast as the fastest peer, on every shape and number of ranks.

    Peers are `torch.optim.Muon` and what else is installed; the evidence names them, and who was left out.
    """
    report = tmp_path / "report.json"
    subprocess.run([sys.executable, "benchmarks/optim.py", "--json", str(report)], cwd=ROOT, check=True, timeout=14_000)
    figures = json.loads(report.read_text())
    ratios = {f"{r['rule']}, {r['shape']}, {r['ranks']}": r["ratio"] for r in figures["races"] if "ratio" in r}
    write_evidence("optim-speed", "python benchmarks/optim.py", figures)
    assert any(race.startswith("muon") for race in ratios)  # whose peer is always there
    slower = {race: ratio for race, ratio in ratios.items() if ratio < 1.0}
    assert not slower, slower
