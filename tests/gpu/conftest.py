"""A gang whose ranks see the GPUs that the rest of the tests does not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.gang import Gang

VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")  # as this file is imported, before the session hides them


@pytest.fixture(scope="session")
def gpu_gang() -> Iterator[Gang]:
    gang = Gang({"CUDA_VISIBLE_DEVICES": VISIBLE})
    yield gang
    gang.stop()
