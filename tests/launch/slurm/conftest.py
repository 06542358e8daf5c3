"""One cluster for all tests that need a real SLURM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.needs import skip_or_fail
from tests.launch.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (reason := missing()) is not None:
        skip_or_fail(f"no SLURM here: {reason}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=4)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
