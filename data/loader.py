"""Batches for a rank at a step, computed from nothing but the numbers given. There is no state to save or to lose."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.errors import UserError
from data.config import DataConfig
from data.dataset import Dataset
from data.mixture import Mixture
from data.packing import Batch, Rows
from data.sources import Sources, check_one_tokenizer
from data.streams import Stream, Streams


class Feed(Protocol):
    """What gives a rank its rows."""

    def train(self, step: int, rank: int, world: int) -> Batch:
        """The rows of `rank` in the global batch of `step` (zero-based): N = global_batch_size / world."""


@dataclass(frozen=True)
class Use:
    """What some steps take of one source."""

    folder: str
    share: float  # of the samples
    rows: int  # in an epoch
    before: float  # epochs that were read earlier
    epochs: float  # epochs that are read now
    upsampled: float  # its epochs over those of all sources taken together

    def __str__(self) -> str:
        so_far = f" after {self.before:.2f}" if self.before else ""
        return (
            f"{self.share:.2%} of the samples from {self.folder}: {self.rows:,} sequences an epoch, {self.epochs:.2f} "
            f"epochs{so_far}, sampled {self.upsampled:.2f} times as often as its size says"
        )


class Batches:
    """Training and evaluation batches of one data section.

    A global batch has `global_batch_size` rows. Of `world` ranks, rank r gets the r-th of `world` equal runs of rows,
    so the batches of all ranks, one after the other, are the same global batch at every world size. In a mixture,
    sample g is of the source that `Mixture` gives it; each source goes through its own rows, epoch after epoch.
    """

    def __init__(
        self,
        data: Sources | Dataset,
        config: DataConfig,
        seed: int,
        global_batch_size: int,
        streams: Sequence[Stream] | None = None,
    ) -> None:
        """`streams` are those of the sources in a later stage; by default all begin here."""
        self.data = Sources((data,)) if isinstance(data, Dataset) else data
        self._config, self._global_batch_size = config, global_batch_size
        self._mixture = Mixture.of(self.data.weights)
        self._streams = streams or Streams(seed).of(self.data, config)

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the training split; each comes once an epoch. Of a mixture, the rows of all sources."""
        return sum(len(stream.rows) for stream in self._streams)

    def epoch(self, step: int) -> float:
        """Epochs of training data that were consumed before `step` (zero-based)."""
        return step * self._global_batch_size / self.rows_per_epoch

    def taken(self, steps: int) -> list[int]:
        """Samples of each source in the first `steps` global batches."""
        taken: list[int] = self._mixture.taken(steps * self._global_batch_size).tolist()
        return taken

    def uses(self, steps: int) -> list[Use]:
        """What the first `steps` global batches take of each source."""
        shares, epochs = self._mixture.shares.tolist(), max(self.epoch(steps), 1e-300)
        return [
            Use(str(dataset.folder), share, n := len(stream.rows), stream.first / n, count / n, count / n / epochs)
            for dataset, stream, share, count in zip(
                self.data.datasets, self._streams, shares, self.taken(steps), strict=True
            )
        ]

    def describe(self, steps: int) -> str:
        """What the first `steps` global batches read, in a line or a few."""
        tokens = sum(dataset.train.n_tokens for dataset in self.data.datasets)
        lines = [
            f"data   {tokens:,} tokens = {self.rows_per_epoch:,} sequences an epoch; "
            f"{steps:,} steps read {self.epoch(steps):.2f} epochs"
        ]
        if len(self._streams) > 1 or self._streams[0].first:
            lines += [f"       {use}" for use in self.uses(steps)]
        if self._config.packing != "concat":  # for which one would have to read the index of every shard
            fills = [stream.rows.fill() for stream in self._streams]
            lines += [
                f"       {self._config.packing}: {fill}{f' of {d.folder}' if len(fills) > 1 else ''}"
                for fill, d in zip(fills, self.data.datasets, strict=True)
            ]
        return "\n".join(lines)

    def train(self, step: int, rank: int, world: int) -> Batch:
        """The rows of `rank` in the global batch of `step` (zero-based): N = global_batch_size / world."""
        first, count = self._share(rank, world)
        batch = self._padding(count)
        sources, numbers = self._mixture.samples(step * self._global_batch_size + first, count)
        for source in np.unique(sources):
            places, stream = np.flatnonzero(sources == source), self._streams[source]
            # Samples of one source that follow one another have numbers that do.
            stream.rows.put(stream.ids(int(numbers[places[0]]), len(places)), batch, places)
        self._check_ids(batch, sources)
        return batch

    @functools.cached_property
    def _held_out(self) -> list[Rows | None]:
        """Held-out rows of each source; None: it has no held-out documents."""
        config = self._config
        rows = [
            Rows(d.eval, config.seq_len, config.packing, self.data.eos_id, config.document_mask)
            if d.eval.n_documents
            else None
            for d in self.data.datasets
        ]
        if all(part is None for part in rows):
            raise UserError(
                f"{self.data.folder}: no held-out documents to evaluate on; set eval.batches=0, or tokenize again "
                "with a larger --eval-fraction"
            )
        return rows

    def check_held_out(self) -> None:
        """Raise `UserError` if there is nothing to evaluate on."""
        assert self._held_out

    def eval_batches(self, batches: int, rank: int, world: int) -> Iterator[Batch]:
        """The rows of `rank` in the first `batches` global batches of the held-out split, in file order.

        In a mixture sources take turns as in training, until each is at its end. The split may end sooner than
        `batches`. Its last global batch is filled with masked rows: every rank gets equally many batches of equal
        shape.
        """
        first, count = self._share(rank, world)
        sources, numbers = self._held_out_samples(batches * self._global_batch_size)
        for start in range(0, len(sources), self._global_batch_size):
            batch = self._padding(count)
            mine = sources[start + first : min(start + first + count, start + self._global_batch_size)]
            ids = numbers[start + first : start + first + len(mine)]
            for source in np.unique(mine):
                rows, places = self._held_out[source], np.flatnonzero(mine == source)
                assert rows is not None
                rows.put(ids[places], batch, places)
            self._check_ids(batch, mine)
            yield batch

    def _held_out_samples(self, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and row of the first `limit` held-out samples, or all there are: int64."""
        slots, sources, rows = [], [], []
        for source, held_out in enumerate(self._held_out):
            count = min(limit, len(held_out) if held_out is not None else 0)
            # Sample k of a source is in slot [k % n] of period k // n.
            own = np.flatnonzero(self._mixture.sources == source)
            numbers = np.arange(count, dtype=np.int64)
            slots.append(numbers // len(own) * self._mixture.period + own[numbers % len(own)])
            sources.append(np.full(count, source))
            rows.append(numbers)
        order = np.argsort(np.concatenate(slots))[:limit]
        return np.concatenate(sources)[order], np.concatenate(rows)[order]

    def _padding(self, count: int) -> Batch:
        return Batch.padding(count, self._config.seq_len, self.data.eos_id, self._config.document_mask)

    def _check_ids(self, batch: Batch, sources: np.ndarray) -> None:
        """Refuse ids that the tokenizer has not: an embedding would fail at them far from here, or not at all."""
        for ids in (batch.tokens, batch.targets):
            if ids.min() < 0 or ids.max() >= self.data.vocab_size:
                row, place = np.argwhere((ids < 0) | (ids >= self.data.vocab_size))[0]
                folder = self.data.datasets[sources[row]].folder
                raise UserError(
                    f"{folder}: holds token id {ids[row, place]}, but its tokenizer has the ids 0 ... "
                    f"{self.data.vocab_size - 1}; the tokens are damaged or of another tokenizer: look with `gramian "
                    f"data verify {folder}`"
                )

    def _share(self, rank: int, world: int) -> tuple[int, int]:
        """First row in the global batch, and number of rows, of a rank."""
        if self._global_batch_size % world:
            raise UserError(
                f"train.global_batch_size: {self._global_batch_size} rows cannot be shared equally by {world} data "
                f"ranks; make it a multiple of {world}"
            )
        count = self._global_batch_size // world
        return rank * count, count


@dataclass(frozen=True)
class Part:
    """A stage: a number of steps on one data section."""

    data: Sources
    config: DataConfig
    global_batch_size: int
    steps: int


class StagedBatches:
    """The training batches of stages that follow one another; `stages` has the `Batches` of each."""

    def __init__(self, stages: Sequence[Part], seed: int) -> None:
        check_one_tokenizer([dataset for stage in stages for dataset in stage.data.datasets])
        self.stages: list[Batches] = []
        self._steps = [stage.steps for stage in stages]
        self._begins = [sum(self._steps[:i]) for i in range(len(stages))]
        streams = Streams(seed)
        for stage in stages:
            of_stage = streams.of(stage.data, stage.config)
            batches = Batches(stage.data, stage.config, seed, stage.global_batch_size, of_stage)
            streams.advance(stage.data, stage.config, batches.taken(stage.steps))
            self.stages.append(batches)

    def train(self, step: int, rank: int, world: int) -> Batch:
        """The rows of `rank` in the global batch of `step` (zero-based, over all stages)."""
        stage = bisect.bisect_right(self._begins, step) - 1
        return self.stages[stage].train(step - self._begins[stage], rank, world)

    def describe(self) -> str:
        """What each stage reads."""
        whole = zip(self.stages, self._steps, strict=True)
        return "\n".join(batches.describe(steps) for batches, steps in whole)
