"""The benchmark of saves runs; what it measures is not asserted."""

from __future__ import annotations

import re

from tests.benchmarks.scripts import printed


def test_checkpoint_benchmark_prints_stalls_and_their_ratios() -> None:
    output = printed("checkpoint.py", "--megabytes", "1", "--rounds", "1")
    number = r"[\d,.]+"
    cost = rf"stall +{number} s \( *{number}x ours; first save {number} s\)  lost +{number} s +{number} MB/s"
    for name in ("gramian", "gramian, async: false", "torch.save", "DCP", "DCP async_save"):
        assert re.search(rf"^{name} +{cost}$", output, re.M), (name, output)
