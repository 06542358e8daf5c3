"""A collapsed router over 200 steps on the standard library: what balances it, and that nothing else does."""

from __future__ import annotations

import pytest

from tests.gang import Gang
from tests.trainer.balance import WAYS, largest_load
from tests.verify.evidence import write_evidence

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800)]
STEPS, LAST = 200, 20


def test_what_balances_a_collapsed_router(gang: Gang) -> None:
    """Largest load over the mean load, of the worst layer, mean of steps 181 to 200."""
    loads = {
        name: [
            round(
                gang.run(
                    largest_load,
                    [way, "data.corpus=python-stdlib", f"run.seed={seed}"],
                    STEPS,
                    LAST,
                    world=1,
                    timeout=600,
                )[0],
                3,
            )
            for seed in (0, 1)
        ]
        for name, way in WAYS.items()
    }
    write_evidence("moe-balance", "pytest -m verify tests/verify/test_balance.py", {"largest load over mean": loads})
    assert max(loads["auxiliary loss 0.01"]) < 2.2
    assert max(loads["bias rate 0.01"]) < 1.7
    assert min(loads["none"]) > 3.5
