"""Jobs on a real SLURM: started by srun and by torchrun, preempted, out of time, on nodes that die."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.gang import Gang
from tests.launch.slurm import ordeal
from tests.launch.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(400)


def test_the_hard_case(cluster: Cluster, gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """Once; ten times in tests/verify/test_slurm.py."""
    plain, chain = ordeal.unbroken(gang, corpus, tmp_path / "unbroken")
    came = ordeal.through(cluster, corpus, tmp_path / "slurm", random.Random(1))
    ordeal.assert_unharmed(came, plain, chain)
    assert sorted(event["event"] for event in came.met) == sorted(ordeal.EVENTS)
