from __future__ import annotations

import numpy as np
import pytest

from common.errors import UserError
from data.config import DataConfig
from data.loader import Batches
from data.order import sample_ids
from data.packing import Batch, Rows
from data.prepare import PreparedData
from tests.datasets import followed_by


def batches(prepared: PreparedData, config: DataConfig, size: int = 8, seed: int = 3, **changes: object) -> Batches:
    return Batches(prepared, DataConfig.model_validate({**config.model_dump(), **changes}), seed, size)


def joined(parts: list[Batch]) -> Batch:
    whole = parts[0]
    for part in parts[1:]:
        whole = followed_by(whole, part)
    return whole


def equal(a: Batch, b: Batch) -> bool:
    names = ("tokens", "targets", "mask", "documents")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


@pytest.mark.parametrize("packing", ["concat", "pad", "best_fit"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_global_batch_is_the_same_at_every_world_size(
    prepared: PreparedData, config: DataConfig, packing: str, world: int
) -> None:
    loader = batches(prepared, config, packing=packing, document_mask=packing == "best_fit")
    for step in (0, 1, 1000):
        whole = loader.train(step, 0, 1)
        assert whole.tokens.shape == (8, 64)
        assert equal(joined([loader.train(step, rank, world) for rank in range(world)]), whole)
    whole = joined(list(loader.eval_batches(3, 0, 1)))
    by_rank = [list(loader.eval_batches(3, rank, world)) for rank in range(world)]
    assert equal(joined([joined(list(turn)) for turn in zip(*by_rank, strict=True)]), whole)


def test_batches_are_a_pure_function_of_the_step(prepared: PreparedData, config: DataConfig) -> None:
    loader = batches(prepared, config)
    later = loader.train(17, 0, 1)
    for step in range(17):
        loader.train(step, 0, 1)
    assert equal(loader.train(17, 0, 1), later)
    assert equal(batches(prepared, config).train(17, 0, 1), later)
    assert not equal(batches(prepared, config, seed=4).train(17, 0, 1), later)


def test_samples_follow_the_order(prepared: PreparedData, config: DataConfig) -> None:
    loader = batches(prepared, config)
    rows = Rows(prepared.train, 64, "concat", 1)
    assert loader.rows_per_epoch == len(rows)
    assert equal(loader.train(5, 1, 2), rows.take(sample_ids(3, len(rows), 5 * 8 + 4, 4)))


def test_an_epoch_holds_every_row_once(prepared: PreparedData, config: DataConfig) -> None:
    loader = batches(prepared, config, size=1, seq_len=2048)
    n = loader.rows_per_epoch
    for epoch in range(2):
        seen = np.concatenate([loader.train(epoch * n + step, 0, 1).tokens for step in range(n)])
        expected = Rows(prepared.train, 2048, "concat", 1).take(np.arange(n)).tokens
        assert np.array_equal(np.unique(seen, axis=0), np.unique(expected, axis=0))


def test_a_batch_may_be_larger_than_the_corpus(prepared: PreparedData, config: DataConfig) -> None:
    loader = batches(prepared, config, size=100, seq_len=2048)
    assert loader.rows_per_epoch < 100
    assert loader.train(0, 0, 1).tokens.shape == (100, 2048)


def test_epoch(prepared: PreparedData, config: DataConfig) -> None:
    loader = batches(prepared, config)
    assert loader.epoch(0) == 0.0
    assert loader.epoch(10) == pytest.approx(80 / loader.rows_per_epoch)


@pytest.mark.parametrize("world", [1, 4])
def test_evaluation_reads_the_held_out_rows_once_and_fills_up(
    prepared: PreparedData, config: DataConfig, world: int
) -> None:
    loader = batches(prepared, config, size=16)
    rows = Rows(prepared.eval, 64, "concat", 1)
    whole = rows.take(np.arange(len(rows)))
    assert len(rows) % 16
    by_rank = [list(loader.eval_batches(10**6, rank, world)) for rank in range(world)]
    assert {len(parts) for parts in by_rank} == {-(-len(rows) // 16)}
    assert {part.tokens.shape for parts in by_rank for part in parts} == {(16 // world, 64)}
    everything = joined([joined(list(turn)) for turn in zip(*by_rank, strict=True)])
    assert equal(
        Batch(everything.tokens[: len(rows)], everything.targets[: len(rows)], everything.mask[: len(rows)]), whole
    )
    assert not everything.mask[len(rows) :].any()
    assert len(list(loader.eval_batches(1, 0, world))) == 1


def test_a_batch_that_cannot_be_shared_is_an_error(prepared: PreparedData, config: DataConfig) -> None:
    loader = batches(prepared, config)
    message = r"train\.global_batch_size: 8 rows cannot be shared equally by 3 data ranks; make it a multiple of 3"
    with pytest.raises(UserError, match=message):
        loader.train(0, 0, 3)
    with pytest.raises(UserError, match=message):
        next(loader.eval_batches(1, 0, 3))


def test_rows_longer_than_the_held_out_split_are_an_error(prepared: PreparedData, config: DataConfig) -> None:
    loader = batches(prepared, config, seq_len=prepared.eval.n_tokens)
    with pytest.raises(UserError, match=r"data\.seq_len: .* longer than .*eval; .* raise data\.eval_fraction"):
        loader.check_held_out()
