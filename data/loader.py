"""Batches for a rank at a step, computed from nothing but the numbers given. There is no state to save or to lose."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from common.errors import UserError
from data.config import DataConfig
from data.order import sample_ids
from data.packing import Batch, Rows
from data.prepare import PreparedData


class Batches:
    """Training and evaluation batches of prepared data.

    A global batch has `global_batch_size` rows. Of `world` ranks, rank r gets the r-th of `world` equal runs of rows,
    so the batches of all ranks, one after the other, are the same global batch at every world size.
    """

    def __init__(self, prepared: PreparedData, config: DataConfig, seed: int, global_batch_size: int) -> None:
        self._seed, self._global_batch_size, self._seq_len = seed, global_batch_size, config.seq_len
        self._eos_id = int(prepared.manifest["eos_id"])
        self._train = Rows(prepared.train, config.seq_len, config.packing, self._eos_id)
        self._eval = Rows(prepared.eval, config.seq_len, config.packing, self._eos_id)

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the training split; each comes once an epoch."""
        return len(self._train)

    def epoch(self, step: int) -> float:
        """Epochs of training data that were consumed before `step` (zero-based)."""
        return step * self._global_batch_size / self.rows_per_epoch

    def train(self, step: int, rank: int, world: int) -> Batch:
        """The rows of `rank` in the global batch of `step` (zero-based): N = global_batch_size / world."""
        first, count = self._share(rank, world)
        start = step * self._global_batch_size + first
        return self._train.take(sample_ids(self._seed, len(self._train), start, count))

    def eval_batches(self, batches: int, rank: int, world: int) -> Iterator[Batch]:
        """The rows of `rank` in the first `batches` global batches of the held-out split, in file order.

        The split may end sooner. Its last global batch is filled with masked rows: every rank gets equally many batches
        of equal shape.
        """
        first, count = self._share(rank, world)
        for start in range(first, min(batches * self._global_batch_size, self._eval_places()), self._global_batch_size):
            real = np.arange(start, min(start + count, len(self._eval)))
            padding = Batch.padding(count - len(real), self._seq_len, self._eos_id)
            yield self._eval.take(real).followed_by(padding)

    def _eval_places(self) -> int:
        """Rows of the held-out split, filled up to whole global batches."""
        return -(-len(self._eval) // self._global_batch_size) * self._global_batch_size

    def _share(self, rank: int, world: int) -> tuple[int, int]:
        """First row in the global batch, and number of rows, of a rank."""
        if self._global_batch_size % world:
            raise UserError(
                f"train.global_batch_size: {self._global_batch_size} rows cannot be shared equally by {world} data "
                f"ranks; make it a multiple of {world}"
            )
        count = self._global_batch_size // world
        return rank * count, count
