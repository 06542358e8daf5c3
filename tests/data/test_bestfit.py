from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from data import bestfit
from data.bestfit import BestFit, pack

Contents = list[list[int]]


def contents(sizes: list[int], capacity: int) -> Contents:
    """The sizes in each bin."""
    bins = pack(np.array(sizes, dtype=np.int64), capacity)
    assert sorted(set(bins.tolist())) == list(range(len(set(bins.tolist()))))
    return [[size for size, b in zip(sizes, bins, strict=True) if b == i] for i in range(len(set(bins.tolist())))]


def one_by_one(sizes: list[int], capacity: int, best: bool, decreasing: bool) -> list[int]:
    """Spaces left by the dullest form of best fit or first fit."""
    spaces: list[int] = []
    for size in sorted(sizes, reverse=True) if decreasing else sizes:
        fitting = [i for i, space in enumerate(spaces) if space >= size]
        if not fitting:
            spaces.append(capacity - size)
        else:
            chosen = min(fitting, key=lambda i: spaces[i]) if best else fitting[0]
            spaces[chosen] -= size
    return sorted(spaces)


def fewest(sizes: list[int], capacity: int) -> int:
    """The least number of bins that is possible, by trying everything."""
    if not sizes:
        return 0
    first, rest = sizes[0], sizes[1:]
    best = len(sizes)
    for k in range(len(rest) + 1):
        for partners in itertools.combinations(range(len(rest)), k):
            if first + sum(rest[i] for i in partners) <= capacity:
                best = min(best, 1 + fewest([s for i, s in enumerate(rest) if i not in partners], capacity))
    return best


def problem(seed: int, most: int) -> tuple[list[int], int]:
    generator = random.Random(seed)
    capacity = generator.randint(1, 60)
    largest = generator.randint(1, capacity)
    return [generator.randint(1, largest) for _ in range(generator.randint(0, most))], capacity


@pytest.mark.parametrize("seed", range(150))
def test_is_best_fit_decreasing(seed: int) -> None:
    """Placing the items of one size together gives what placing each gives."""
    sizes, capacity = problem(seed, 120)
    ours = contents(sizes, capacity)
    assert sorted(size for row in ours for size in row) == sorted(sizes)
    assert sorted(capacity - sum(row) for row in ours) == one_by_one(sizes, capacity, best=True, decreasing=True)


@pytest.mark.parametrize("seed", range(60))
def test_bins_against_brute_force_and_first_fit(seed: int) -> None:
    """Never below the bound by volume, never more than 11/9 of what is possible and one; seldom above first fit."""
    sizes, capacity = problem(1000 + seed, 7)
    bins, possible = len(contents(sizes, capacity)), fewest(sizes, capacity)
    assert -(-sum(sizes) // capacity) <= possible <= bins <= 11 / 9 * possible + 6 / 9
    assert bins <= len(one_by_one(sizes, capacity, best=False, decreasing=False))


def test_first_fit_in_the_files_order_needs_more() -> None:
    """In sum over the problems above, made larger."""
    ours = theirs = bound = 0
    for seed in range(50):
        sizes, capacity = problem(seed, 300)
        ours += len(contents(sizes, capacity))
        theirs += len(one_by_one(sizes, capacity, best=False, decreasing=False))
        bound += -(-sum(sizes) // capacity)
    assert bound <= ours < theirs
    assert ours / bound < 1.07


def starts_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def pieces(plan: BestFit, lengths: list[int], seq_len: int) -> list[list[tuple[int, int, int]]]:
    """(document, first prediction, predictions) of every row."""
    rows = []
    for row in range(plan.n_rows):
        documents, piece = plan.row(row)
        if piece is not None:
            rows.append([(documents[0], piece * seq_len, seq_len)])
        else:
            rests = [(lengths[d] - 1) % seq_len for d in documents]
            rows.append([(d, lengths[d] - 1 - rest, rest) for d, rest in zip(documents, rests, strict=True)])
    return rows


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("window", [5, 65_536])
@pytest.mark.parametrize("seed", range(12))
def test_every_prediction_is_in_one_row_and_short_documents_are_whole(
    seed: int, window: int, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bestfit, "WINDOW", window)
    generator = random.Random(seed)
    seq_len = generator.choice((1, 2, 7, 32))
    lengths = [generator.choice((0, 1, 2, 3, generator.randint(0, 100))) for _ in range(40)]
    plan = BestFit(starts_of(lengths), seq_len, gap)
    rows = pieces(plan, lengths, seq_len)
    predicted = Counter((d, p) for row in rows for d, first, count in row for p in range(first, first + count))
    assert predicted == Counter((d, p) for d, length in enumerate(lengths) for p in range(max(length - 1, 0)))
    of_document = Counter(d for row in rows for d, _, _ in row)
    assert all(of_document[d] == -(-(n - 1) // seq_len) for d, n in enumerate(lengths) if n > 1)
    assert plan.cut == sum(n - 1 > seq_len for n in lengths)
    filled = [sum(count for _, _, count in row) + gap * (len(row) - 1) for row in rows]
    assert all(1 <= n <= seq_len for n in filled)
    assert plan.padding == seq_len * len(rows) - sum(filled)
    assert all(row == sorted(row) for row in rows)
    # The bound of bin packing by volume, and first fit.
    assert plan.n_rows >= -(-sum(max(n - 1, 0) for n in lengths) // seq_len)
    if window > 40:
        rests = [(n - 1) % seq_len + gap for n in lengths if n > 1 and (n - 1) % seq_len]
        assert plan.n_rows - plan.n_full <= len(one_by_one(rests, seq_len + gap, best=False, decreasing=False))


def test_rows_near_each_other_are_of_documents_near_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bestfit, "WINDOW", 100)
    plan = BestFit(starts_of([random.Random(i).randint(2, 30) for i in range(1000)]), 32, 0)
    for row in range(plan.n_rows):
        documents, _ = plan.row(row)
        assert len({d // 100 for d in documents}) == 1


def test_the_same_plan_from_the_same_lengths() -> None:
    lengths = [random.Random(i).randint(2, 90) for i in range(500)]
    a, b = BestFit(starts_of(lengths), 32, 0), BestFit(starts_of(lengths) + 1000, 32, 0)
    assert [a.row(r) for r in range(a.n_rows)] == [b.row(r) for r in range(b.n_rows)]


def test_no_documents_no_rows() -> None:
    for lengths in ([], [0, 1, 1]):
        assert BestFit(starts_of(lengths), 8, 0).n_rows == 0


def test_a_real_distribution_leaves_almost_nothing_empty() -> None:
    """Lengths as of web pages: less than a tenth of a percent of the positions, where padding wastes half."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(rng.lognormal(6, 1.2, 20_000).astype(int), 2)
    plan = BestFit(starts_of(lengths.tolist()), 2048, 0)
    assert plan.padding / (plan.n_rows * 2048) < 1e-3
    padded = -(-(lengths - 1) // 2048)
    assert 1 - (lengths - 1).sum() / (padded.sum() * 2048) > 0.5
