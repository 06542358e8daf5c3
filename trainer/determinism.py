"""The switch `train.deterministic`: only algorithms that give the same bits every time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """Have torch choose deterministic kernels, and refuse operators that have none, until the context ends.

    On the CPU the kernels that a training step uses are deterministic anyway, for a fixed number of threads. On a GPU
    the gradients of the embedding, of attention and of scattered sums are not, without this.
    """
    if not on:
        yield
        return
    # Read when cuBLAS is first used; without it torch refuses matrix products in this mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Nothing here reads memory that it has not written, so there is nothing to be filled.
    with _mode(warn_only=False, fill=False):
        yield


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill new memory with NaN (integers: their largest value), so that a value that nobody wrote is noticed."""
    with _mode(warn_only=True, fill=True):  # the filling is a part of torch's deterministic mode
        yield


@contextmanager
def _mode(warn_only: bool, fill: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before_fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = before_fill  # type: ignore[attr-defined]
