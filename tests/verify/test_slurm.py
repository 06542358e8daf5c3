"""Ten jobs on a real SLURM, each preempted, out of time, with a node that dies in a save, and requeued by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.gang import Gang
from tests.launch.slurm import ordeal
from tests.launch.slurm.cluster import Cluster
from tests.verify.evidence import write_evidence

pytestmark = [pytest.mark.verify, pytest.mark.timeout(7200)]

TIMES = 10
COMMAND = "pytest -m verify tests/verify/test_slurm.py"


def test_ten_ordeals(cluster: Cluster, gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """Two nodes of two processes; events in any order, at random steps."""
    plain, chain = ordeal.unbroken(gang, corpus, tmp_path / "unbroken", 4)
    came = []
    for number in range(TIMES):
        one = ordeal.through(cluster, corpus, tmp_path / str(number), random.Random(number), 2)
        ordeal.assert_unharmed(one, plain, chain)
        came.append({"events": one.met, "starts": one.log.count(" start "), "left_behind": len(one.left_behind)})
    figures = {
        "keys": list(ordeal.HARD),
        "steps": ordeal.STEPS,
        "jobs": came,
        "bits_that_differ": 0,
        "links_of_the_chain_that_differ": 0,
    }
    write_evidence("slurm", COMMAND, figures)
