"""A rank's share of a batch, cut into micro-batches on its device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from data.packing import Batch


def micro_batches(batch: Batch, size: int, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of the model for `size` rows each, in order.

    They are tokens, targets and mask, (B, T), int64, int64 and bool. Where a batch keeps documents apart, there follow
    no cache, and the documents, (B, T), int32.
    """
    for start in range(0, len(batch.tokens), size):
        rows = slice(start, start + size)
        arrays = [batch.tokens, batch.targets, batch.mask]
        if batch.documents is not None:
            arrays.append(batch.documents)
        # Copies from pinned memory go on while the host does; from other memory they are waited for.
        tensors = [torch.from_numpy(array[rows]).to(device, non_blocking=True) for array in arrays]
        yield (*tensors[:3], None, tensors[3]) if len(tensors) > 3 else tuple(tensors)


def pinned(batch: Batch) -> Batch:
    """The same in memory that a GPU reads by itself. It must live until the copies are made, as a step's batch does."""

    def pin(array: np.ndarray) -> np.ndarray:
        return torch.from_numpy(array).pin_memory().numpy()

    documents = None if batch.documents is None else pin(batch.documents)
    return Batch(pin(batch.tokens), pin(batch.targets), pin(batch.mask), documents)
