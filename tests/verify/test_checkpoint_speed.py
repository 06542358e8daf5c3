"""What a save costs the training loop: `benchmarks/checkpoint.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify.evidence import ROOT, write_evidence

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3_600)]


def test_the_loop_stands_for_a_tenth_of_a_synchronous_save(tmp_path: Path) -> None:
    """From the second save on, with 600 MB of state, against each that makes its bytes durable as ours does."""
    command = "python benchmarks/checkpoint.py --rounds 9"
    report = tmp_path / "report.json"
    words = [sys.executable, *command.split()[1:], "--json", str(report)]
    subprocess.run(words, cwd=ROOT, check=True, timeout=3_000)
    figures = json.loads(report.read_text())
    assert figures["bytes"] >= 500_000_000
    write_evidence("checkpoint-speed", command, figures)
    for synchronous in ("gramian, async: false", "DCP"):
        assert figures["savers"][synchronous]["stall_by_ours"] >= 10, synchronous
