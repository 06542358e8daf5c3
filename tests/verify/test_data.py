"""Tokenizing and reading beside peers, in proportion: `benchmarks/data.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify.evidence import ROOT, write_evidence

pytestmark = [pytest.mark.verify, pytest.mark.timeout(7200)]


def test_as_fast_as_peers(tmp_path: Path) -> None:
    """At least 0.95 times as fast as the best of them, from start to end; the loader at least 20 times what the
    quickstart's model takes."""
    words = ["benchmarks/data.py", "--megabytes", "100", "--rounds", "7"]
    report = tmp_path / "report.json"
    subprocess.run([sys.executable, *words, "--json", str(report)], cwd=ROOT, check=True, timeout=7000)
    figures = json.loads(report.read_text())
    write_evidence("data", f"python {' '.join(words)}", figures)
    for kind in ("sentencepiece", "huggingface"):
        peers = {name: row["gramian_is_faster_by"] for name, row in figures[kind].items() if name != "gramian"}
        peers.pop("map alone")  # leaves out what a user waits for
        assert peers
        assert min(peers.values()) > 0.95, peers
    assert min(figures["loader"].values()) > 20
