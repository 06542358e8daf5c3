"""The benchmark of the document mask runs; what it measures is not asserted."""

from __future__ import annotations

import re

from tests.benchmarks.scripts import printed


def test_document_mask_benchmark_prints_a_line_for_each_shape() -> None:
    words = ["--tokens", "64", "--seq", "32", "64", "--documents", "1", "3", "--rounds", "1"]
    output = printed("document_mask.py", *words)
    lines = re.findall(r"^ +(\d+) +(\d+)(?: +[\d.]+){4}  \|(?: +[\d.]+){4}  (loop|mask)$", output, re.M)
    assert [line[:2] for line in lines] == [("32", "1"), ("32", "3"), ("64", "1"), ("64", "3")]
