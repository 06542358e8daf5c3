"""What a machine must have for some tests."""

from __future__ import annotations

import os

import pytest


def skip_or_fail(reason: str) -> None:
    """Skip; where CI has installed what is needed, fail."""
    if os.environ.get("GRAMIAN_NO_SKIPS"):
        pytest.fail(f"GRAMIAN_NO_SKIPS is set, but: {reason}")
    pytest.skip(reason)
