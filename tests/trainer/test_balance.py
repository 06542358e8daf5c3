"""A collapsed router comes back by the auxiliary loss and by the selection bias, and by nothing else.

The long tier has the whole course of 200 steps, tests/verify/test_balance.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang import Gang
from tests.trainer.balance import WAYS, largest_load

# Measured over two seeds after 60 steps: 4.0 without balancing, 1.6 to 2.2 with the loss, 1.5 to 1.7 with the bias.
BOUNDS = {"none": (3.5, 4.01), "auxiliary loss 0.01": (1.0, 2.8), "bias rate 0.01": (1.0, 2.3)}


@pytest.mark.parametrize("way", WAYS)
def test_the_load_of_a_collapsed_router(gang: Gang, paragraphs: Path, way: str) -> None:
    keys = [WAYS[way], f"data.corpus={paragraphs}"]
    low, high = BOUNDS[way]
    assert low < gang.run(largest_load, keys, 60, 10, world=1, timeout=200)[0] < high
