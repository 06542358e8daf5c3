"""A rank's share of a batch, cut into micro-batches on its device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from data.packing import Batch


def micro_batches(batch: Batch, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (tokens, targets, mask) of `size` rows each, (B, T), int64, int64 and bool, in order."""
    for start in range(0, len(batch.tokens), size):
        rows = slice(start, start + size)
        tokens, targets, mask = (torch.from_numpy(a[rows]) for a in (batch.tokens, batch.targets, batch.mask))
        yield tokens.to(device), targets.to(device), mask.to(device)
