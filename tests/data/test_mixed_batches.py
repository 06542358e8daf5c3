"""Batches of several sources and of several stages: who comes when, read off the rows themselves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from data.config import DataConfig
from data.dataset import Dataset
from data.loader import Batches, Part, StagedBatches
from data.mixture import Mixture
from data.order import sample_ids
from data.packing import Batch, Rows
from data.sources import Sources, open_sources
from data.streams import Streams
from tests.data.test_loader import equal, joined
from tests.datasets import EOS, make_dataset, random_texts

SEQ_LEN, BATCH, SEED = 16, 8, 5
WEIGHTS = (0.5, 0.3, 0.2)
# Each source has letters of its own, so that a row tells where it is from.
LETTERS = ("abcdefgh", "ijklmnop", "qrstuvwxyz")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    """Three sources of different sizes, the third without held-out documents."""
    folder = tmp_path_factory.mktemp("sources")
    return [
        make_dataset(folder / name, random_texts(i, 30 * (i + 1), LETTERS[i]), held_out=0.15 if i < 2 else 0.0)
        for i, name in enumerate(("one", "two", "three"))
    ]


def mixture_of(datasets: list[Dataset], weights: tuple[float, ...] = WEIGHTS, **keys: Any) -> DataConfig:
    mixture = [{"path": str(d.folder), "weight": w} for d, w in zip(datasets, weights, strict=True)]
    return DataConfig.model_validate({"mixture": mixture, "seq_len": SEQ_LEN, **keys})


def batches(config: DataConfig, size: int = BATCH) -> Batches:
    return Batches(open_sources(config), config, SEED, size)


def source_of(row: np.ndarray) -> int:
    """Which source a row is from, by its letters."""
    found = {i for i, letters in enumerate(LETTERS) if any(ord(letter) in row for letter in letters)}
    assert len(found) == 1
    return found.pop()


def flat(batch: Batch) -> list[tuple[int, ...]]:
    """A row with its targets and mask, as one value each."""
    return [tuple(np.concatenate(parts).tolist()) for parts in zip(batch.tokens, batch.targets, batch.mask)]  # noqa: B905


@pytest.mark.parametrize("packing", ["concat", "pad", "best_fit"])
def test_sources_come_by_weight_and_each_goes_through_its_own_epochs(datasets: list[Dataset], packing: str) -> None:
    loader = batches(mixture_of(datasets, packing=packing))
    rows = [row for step in range(160) for row in loader.train(step, 0, 1).tokens]
    sources = [source_of(row) for row in rows]
    for n in range(1, len(rows) + 1):
        had = Counter(sources[:n])
        assert all(abs(had[i] - weight * n) < 1 for i, weight in enumerate(WEIGHTS))
    for i, dataset in enumerate(datasets):
        own = [tuple(row.tolist()) for row, source in zip(rows, sources, strict=True) if source == i]
        theirs = Rows(dataset.train, SEQ_LEN, packing, EOS)  # type: ignore[arg-type]
        expected = Counter(tuple(row.tolist()) for row in theirs.take(np.arange(len(theirs))).tokens)
        assert len(own) > len(theirs) or i == 2
        for epoch in range(len(own) // len(theirs)):  # no repeat before the source is exhausted
            assert Counter(own[epoch * len(theirs) : (epoch + 1) * len(theirs)]) == expected
    uses = loader.uses(160)
    assert [use.epochs for use in uses] == [
        pytest.approx(Counter(sources)[i] / len(Rows(d.train, SEQ_LEN, packing, EOS)))  # type: ignore[arg-type]
        for i, d in enumerate(datasets)
    ]
    assert [use.share for use in uses] == pytest.approx(WEIGHTS)


def test_upsampling_is_stated(datasets: list[Dataset]) -> None:
    loader = batches(mixture_of(datasets))
    total = sum(use.rows for use in loader.uses(10))
    for use, weight in zip(loader.uses(10), WEIGHTS, strict=True):
        assert use.upsampled == pytest.approx(weight / (use.rows / total), rel=0.05)
    first, one, *_ = loader.describe(10).splitlines()
    assert first.startswith("data   ")
    assert (
        one.split()
        == (
            f"50.00% of the samples from {datasets[0].folder}: {loader.uses(10)[0].rows} sequences an epoch, "
            f"{loader.uses(10)[0].epochs:.2f} epochs, sampled {loader.uses(10)[0].upsampled:.2f} times as often as its "
            "size says"
        ).split()
    )


@pytest.mark.parametrize("world", [2, 4])
def test_the_global_batch_is_the_same_at_every_world_size(datasets: list[Dataset], world: int) -> None:
    loader = batches(mixture_of(datasets, packing="best_fit", document_mask=True))
    for step in (0, 1, 77):
        whole = loader.train(step, 0, 1)
        assert equal(joined([loader.train(step, rank, world) for rank in range(world)]), whole)
    whole = joined(list(loader.eval_batches(3, 0, 1)))
    by_rank = [list(loader.eval_batches(3, rank, world)) for rank in range(world)]
    assert equal(joined([joined(list(turn)) for turn in zip(*by_rank, strict=True)]), whole)


def test_the_order_of_a_source_does_not_depend_on_the_others(datasets: list[Dataset]) -> None:
    def own(chosen: list[int], weights: tuple[float, ...], source: int) -> list[tuple[int, ...]]:
        loader = batches(mixture_of([datasets[i] for i in chosen], weights))
        rows = [row for step in range(20) for row in loader.train(step, 0, 1).tokens]
        return [tuple(row.tolist()) for row in rows if source_of(row) == source][:30]

    expected = own([0, 1, 2], WEIGHTS, 1)
    assert own([1, 0], (0.5, 0.5), 1) == expected
    assert own([2, 1], (0.1, 0.9), 1) == expected


def test_a_mixture_of_one_is_the_folder_alone(datasets: list[Dataset]) -> None:
    alone = DataConfig(path=str(datasets[1].folder), seq_len=SEQ_LEN)
    rows = Rows(datasets[1].train, SEQ_LEN, "concat", EOS)
    for config in (alone, mixture_of([datasets[1]], (3.0,))):
        loader = batches(config)
        for step in (0, 5, 50):
            expected = rows.take(sample_ids(SEED, len(rows), step * BATCH, BATCH))
            assert equal(loader.train(step, 0, 1), expected)


def test_held_out_samples_take_turns_until_all_were_read(datasets: list[Dataset]) -> None:
    loader = batches(mixture_of(datasets))
    found = [row for batch in loader.eval_batches(1000, 0, 1) for row in batch.tokens[batch.mask.any(axis=1)]]
    sources = [source_of(row) for row in found]
    held_out = [Rows(d.eval, SEQ_LEN, "concat", EOS) for d in datasets[:2]]
    assert Counter(sources) == {i: len(rows) for i, rows in enumerate(held_out)}
    for i, rows in enumerate(held_out):
        own = [row for row, source in zip(found, sources, strict=True) if source == i]
        assert np.array_equal(own, rows.take(np.arange(len(rows))).tokens)
    # As long as both last, in the order of the schedule.
    both = len(sources) - max(sources[::-1].index(0), sources[::-1].index(1))
    assert both < len(sources)
    assert sources[:both] == [s for s in Mixture.of(WEIGHTS).samples(0, 1000)[0].tolist() if s != 2][:both]
    assert len(list(loader.eval_batches(1, 0, 1))) == 1


def test_nothing_held_out_is_an_error(datasets: list[Dataset]) -> None:
    with pytest.raises(UserError, match=r"three: no held-out documents to evaluate on; set eval\.batches=0, or"):
        batches(DataConfig(path=str(datasets[2].folder), seq_len=SEQ_LEN)).check_held_out()


def staged(datasets: list[Dataset], *stages: tuple[DataConfig, int, int], seed: int = SEED) -> StagedBatches:
    """Stages given as (data section, global batch size, steps)."""
    return StagedBatches([Part(open_sources(config), config, size, steps) for config, size, steps in stages], seed)


def rows_of(batches: StagedBatches, steps: range) -> list[tuple[int, ...]]:
    return [row for step in steps for row in flat(batches.train(step, 0, 1))]


def test_a_source_goes_on_where_an_earlier_stage_left_it(datasets: list[Dataset]) -> None:
    """Cut into stages of other batch sizes, a source is read as without stages."""
    alone = DataConfig(path=str(datasets[1].folder), seq_len=SEQ_LEN)
    whole = rows_of(staged(datasets, (alone, 4, 60)), range(60))
    parts = staged(datasets, (alone, 4, 10), (alone, 8, 5), (alone, 2, 80))
    assert rows_of(parts, range(95)) == whole


def test_a_mixture_takes_up_the_source_of_the_stage_before(datasets: list[Dataset]) -> None:
    """Annealing: the one source of the first stage is among several in the second; none of its rows repeats."""
    alone = DataConfig(path=str(datasets[1].folder), seq_len=SEQ_LEN)
    plain = rows_of(staged(datasets, (alone, 4, 60)), range(60))
    stages = staged(datasets, (alone, 4, 10), (mixture_of(datasets), 8, 20))
    first, second = rows_of(stages, range(10)), rows_of(stages, range(10, 30))
    own = [row for row in second if source_of(np.array(row[:SEQ_LEN])) == 1]
    assert first + own == plain[: 40 + len(own)]
    assert len(own) == 48
    # What a run without the second stage reads is what the first stage reads.
    assert rows_of(staged(datasets, (alone, 4, 10)), range(10)) == first
    after = stages.stages[1].uses(20)[1]
    assert after.before == pytest.approx(40 / after.rows)
    assert "epochs after" in str(after)


def test_other_rows_begin_anew_and_the_first_ones_are_taken_up_again(datasets: list[Dataset]) -> None:
    alone = DataConfig(path=str(datasets[1].folder), seq_len=SEQ_LEN)
    longer = alone.model_copy(update={"seq_len": 2 * SEQ_LEN})
    packed = alone.model_copy(update={"packing": "best_fit"})
    stages = staged(datasets, (alone, 4, 10), (longer, 4, 10), (packed, 4, 10), (alone, 4, 10))
    assert rows_of(stages, range(10)) + rows_of(stages, range(30, 40)) == rows_of(
        staged(datasets, (alone, 4, 20)), range(20)
    )
    rows = Rows(datasets[1].train, 2 * SEQ_LEN, "concat", EOS)
    fresh = rows_of(stages, range(10, 20))
    assert len(set(fresh)) == 40
    plain = rows.take(sample_ids(SEED, len(rows), 0, 40))
    assert fresh != flat(plain)  # of another key than the first stream of the run
    assert [stage.uses(10)[0].before for stage in stages.stages][1:3] == [0, 0]


def test_stages_are_a_pure_function_of_the_step(datasets: list[Dataset]) -> None:
    sections = (mixture_of(datasets), 4, 7), (mixture_of(datasets, (0.1, 0.1, 0.8), seq_len=24), 8, 9)
    whole = staged(datasets, *sections)
    expected = [flat(whole.train(step, 0, 1)) for step in range(16)]
    assert [len(rows) for rows in expected] == [4] * 7 + [8] * 9
    for step in (15, 7, 6, 0, 8):
        assert flat(staged(datasets, *sections).train(step, 0, 1)) == expected[step]
    assert flat(staged(datasets, *sections, seed=6).train(3, 0, 1)) != expected[3]


def test_golden_keys(datasets: list[Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that were begun must go on with the same order: these never change."""
    monkeypatch.setattr(Dataset, "data_hash", "00" * 32)
    data, streams = Sources((datasets[0],)), Streams(SEED)
    keys = {"seq_len": 8}, {"seq_len": 8, "packing": "best_fit"}, {"seq_len": 8, "shuffle": {"block": 4}}
    found = [streams.of(data, DataConfig.model_validate({"path": "one", **k}))[0].key for k in ({}, *keys)]
    assert found == [SEED, 13879485564798216218, 15475715072613648462, 210521433013400922]


def test_blocks_are_read_together(datasets: list[Dataset]) -> None:
    config = DataConfig.model_validate(
        {"path": str(datasets[2].folder), "seq_len": SEQ_LEN, "shuffle": {"block": 4, "window": 2}}
    )
    rows = Rows(datasets[2].train, SEQ_LEN, "concat", EOS)
    numbers = {row: i for i, row in enumerate(flat(rows.take(np.arange(len(rows)))))}
    loader = batches(config)
    steps = len(rows) // BATCH
    found = [[numbers[row] for row in flat(loader.train(step, 0, 1))] for step in range(steps)]
    assert len({n for batch in found for n in batch}) == steps * BATCH
    # Nearly every batch is a window: two blocks of four rows. At the short block, and after it, they are not in step.
    assert np.mean([len({n // 4 for n in batch}) for batch in found]) < 4.1


def other_tokenizer(dataset: Dataset, folder: Path) -> Dataset:
    """As if another tokenizer had made it."""
    manifest = {**dataset.manifest, "tokenizer": {**dataset.manifest["tokenizer"], "hash": "0" * 64}}
    return Dataset(dataset.folder, manifest)


def test_sources_of_different_tokenizers_are_refused(datasets: list[Dataset], tmp_path: Path) -> None:
    stranger = other_tokenizer(datasets[1], tmp_path)
    message = r"two was made with another tokenizer than .*one; make one of them again with the tokenizer of the other"
    with pytest.raises(UserError, match=message):
        Sources((datasets[0], stranger), (1, 1))
    config = DataConfig(path="x", seq_len=SEQ_LEN)
    stages = [Part(Sources((dataset,)), config, 4, 5) for dataset in (datasets[0], stranger)]
    with pytest.raises(UserError, match=message):
        StagedBatches(stages, 0)


def test_the_same_tokens_twice_are_refused(datasets: list[Dataset]) -> None:
    copy = Dataset(datasets[0].folder, datasets[0].manifest)
    with pytest.raises(UserError, match=r"data\.mixture: .*one and .*one hold the same tokens; give one"):
        Sources((datasets[0], datasets[1], copy), (1, 1, 1))


def test_a_source_shorter_than_a_row_is_named(datasets: list[Dataset], tmp_path: Path) -> None:
    short = make_dataset(tmp_path / "short", ["abc"])
    with pytest.raises(UserError, match=r"data\.seq_len: a row of 16 tokens .* the 4 tokens of .*short/train; lower"):
        batches(mixture_of([datasets[0], short], (1, 1)))


def test_ids_that_the_tokenizer_has_not_are_named(datasets: list[Dataset]) -> None:
    """As if the last id, which ends each document, were none of the tokenizer's."""
    first = Dataset(datasets[0].folder, {**datasets[0].manifest, "vocab_size": EOS, "eos_id": 10})
    loader = Batches(Sources((first,)), DataConfig(path="one", seq_len=SEQ_LEN), SEED, 64)
    with pytest.raises(UserError, match=r"one: holds token id 256, but its tokenizer has the ids 0 ... 255; .*verify"):
        loader.train(0, 0, 1)
    with pytest.raises(UserError, match=r"one: holds token id 256"):
        next(loader.eval_batches(1, 0, 1))
