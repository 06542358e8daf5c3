"""Streams: the rows of a source in the order in which they are read, over all stages of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from common.files import hash_json
from data.config import DataConfig
from data.dataset import Dataset
from data.order import Shuffle, sample_ids
from data.packing import Rows
from data.sources import Sources


@dataclass(frozen=True)
class Stream:
    """The rows of one source, epoch after epoch, each epoch in an order of its own."""

    rows: Rows
    key: int  # of the order
    shuffle: Shuffle
    first: int  # samples that were read of it before

    def ids(self, start: int, count: int) -> np.ndarray:
        """Rows of the samples start ... start + count - 1, counted from `first`: int64 (count,)."""
        return sample_ids(self.key, len(self.rows), self.first + start, count, self.shuffle)


class Streams:
    """The streams of a run, stage after stage.

    A stream is a source (by the hash of its tokens) with one sequence length, packing and shuffle. Used again in a
    later stage, it goes on where it was: no row comes again before all have come. With another length, packing or
    shuffle the rows are other ones, and it is another stream, which begins at its start.

    The order of a stream follows from the seed and from what the stream is, so that it is the same whatever other
    sources there are. Only the stream of a run that begins with a single source takes the seed as it is.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._keys: dict[str, int] = {}
        self._read: dict[str, int] = {}
        self._rows: dict[tuple[str, bool], Rows] = {}  # the plan of a packing is made once

    def of(self, data: Sources, config: DataConfig) -> list[Stream]:
        """The streams of the next stage, one a source. Raises `UserError` for a source shorter than a row."""
        streams = []
        for dataset in data.datasets:
            identity = _identity(dataset, config)
            name = hash_json([self._seed, *identity])
            plain = not self._keys and len(data.datasets) == 1
            key = self._keys.setdefault(name, self._seed if plain else int(name[:16], 16))
            rows = self._rows.get((name, config.document_mask))
            if rows is None:
                rows = Rows(dataset.train, config.seq_len, config.packing, dataset.eos_id, config.document_mask)
                self._rows[name, config.document_mask] = rows
            streams.append(Stream(rows, key, config.shuffle.order(), self._read.get(name, 0)))
        return streams

    def advance(self, data: Sources, config: DataConfig, taken: list[int]) -> None:
        """Count what a stage takes of each source."""
        for dataset, samples in zip(data.datasets, taken, strict=True):
            name = hash_json([self._seed, *_identity(dataset, config)])
            self._read[name] = self._read.get(name, 0) + samples


def _identity(dataset: Dataset, config: DataConfig) -> list[Any]:
    """What makes a stream the same one."""
    packing: list[Any] = [config.packing]
    if config.packing == "best_fit":
        packing.append(config.document_mask)  # which decides whether documents need a position between them
    order = config.shuffle.order()
    return [dataset.data_hash, config.seq_len, packing, None if order.block is None else [order.block, order.window]]
