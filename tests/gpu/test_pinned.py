"""Batches in pinned memory, made ahead in a thread as the loop does it: needs a machine with a CUDA GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gang import Gang

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def through_the_gpu() -> int:
    """In a rank with a GPU: send batches there and compare; the number of those that were pinned and unchanged."""
    from data.packing import Batch
    from data.prefetch import Prefetched
    from trainer.batch import micro_batches, pinned

    class Feed:
        def train(self, step: int, rank: int, world: int) -> Batch:
            rng = np.random.default_rng(step)
            tokens = rng.integers(0, 1000, (8, 512))
            return Batch(tokens, tokens + 1, tokens > 500, (tokens // 100).astype(np.int32))

    fine = 0
    with Prefetched(Feed(), steps=20, finish=pinned) as ahead:
        for step in range(20):
            batch, expected = ahead.train(step, 0, 1), Feed().train(step, 0, 1)
            on_gpu = list(micro_batches(batch, 3, torch.device("cuda")))
            for index, name in ((0, "tokens"), (1, "targets"), (2, "mask"), (4, "documents")):
                back = torch.cat([micro[index] for micro in on_gpu]).cpu().numpy()
                assert np.array_equal(back, getattr(expected, name))
                assert torch.from_numpy(getattr(batch, name)).is_pinned()
            assert all(micro[3] is None for micro in on_gpu)
            fine += 1
    return fine


def test_pinned_batches_reach_the_gpu_unchanged(gpu_gang: Gang) -> None:
    assert gpu_gang.run(through_the_gpu, world=1) == [20]
