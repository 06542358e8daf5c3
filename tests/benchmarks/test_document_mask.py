"""The benchmark of the document mask runs; what it measures is not asserted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_document_mask_benchmark_prints_a_line_for_each_shape() -> None:
    words = ["--tokens", "64", "--seq", "32", "64", "--documents", "1", "3", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "document_mask.py"), *words],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^ +(\d+) +(\d+)(?: +[\d.]+){4}  \|(?: +[\d.]+){4}  (loop|mask)$", done.stdout, re.M)
    assert [line[:2] for line in lines] == [("32", "1"), ("32", "3"), ("64", "1"), ("64", "3")]
