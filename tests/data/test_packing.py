from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from common.errors import UserError
from data.config import PackingName
from data.packing import Batch, Rows
from data.shards import TokenFile
from tests.datasets import followed_by

EOS = 1
PACKINGS: tuple[PackingName, ...] = ("concat", "pad", "best_fit")
Maker = Callable[..., TokenFile]


def test_concat_cuts_the_stream_without_a_gap(token_file: Maker) -> None:
    rows = Rows(token_file([10, 11, 12, EOS], [13, 14, 15, 16, 17, EOS]), 4, "concat", EOS)
    assert len(rows) == 2
    batch = rows.take(np.array([1, 0]))
    assert batch.tokens.tolist() == [[13, 14, 15, 16], [10, 11, 12, EOS]]
    assert batch.targets.tolist() == [[14, 15, 16, 17], [11, 12, EOS, 13]]
    assert batch.mask.all()
    assert (batch.tokens.dtype, batch.targets.dtype, batch.mask.dtype) == (np.int64, np.int64, np.bool_)


@pytest.mark.parametrize(("n_tokens", "n_rows"), [(5, 1), (8, 1), (9, 2)])
def test_concat_needs_a_target_for_the_last_token(token_file: Maker, n_tokens: int, n_rows: int) -> None:
    assert len(Rows(token_file(list(range(n_tokens))), 4, "concat", EOS)) == n_rows


def test_pad_gives_each_document_rows_of_its_own(token_file: Maker) -> None:
    rows = Rows(token_file([10, EOS], [20, 21, 22, 23, 24, EOS], [30, 31, 32, 33, EOS]), 4, "pad", EOS)
    assert len(rows) == 4
    batch = rows.take(np.arange(4))
    assert batch.tokens.tolist() == [[10, 1, 1, 1], [20, 21, 22, 23], [24, 1, 1, 1], [30, 31, 32, 33]]
    assert batch.targets.tolist() == [[1, 1, 1, 1], [21, 22, 23, 24], [1, 1, 1, 1], [31, 32, 33, 1]]
    assert batch.mask.sum(axis=1).tolist() == [1, 4, 1, 4]
    assert batch.mask[0].tolist() == [True, False, False, False]


@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 50])
def test_pad_predicts_every_token_but_the_first_of_each_document_once(token_file: Maker, seq_len: int) -> None:
    rng = np.random.default_rng(seq_len)
    documents = [[*rng.integers(2, 100, size=rng.integers(1, 20)).tolist(), EOS] for _ in range(30)]
    batch = (rows := Rows(token_file(*documents), seq_len, "pad", EOS)).take(np.arange(len(rows)))
    assert batch.targets[batch.mask].tolist() == [token for document in documents for token in document[1:]]
    assert batch.tokens[batch.mask].tolist() == [token for document in documents for token in document[:-1]]
    assert (batch.tokens[~batch.mask] == EOS).all()


def test_pad_has_no_rows_for_documents_without_a_prediction(token_file: Maker) -> None:
    rows = Rows(token_file([], [EOS], [5, EOS], []), 4, "pad", EOS)
    assert rows.take(np.arange(len(rows))).tokens.tolist() == [[5, 1, 1, 1]]


@pytest.mark.parametrize("packing", PACKINGS)
def test_less_than_a_row_is_an_error(token_file: Maker, packing: PackingName) -> None:
    tokens = token_file([5, 6, 7, EOS]) if packing == "concat" else token_file([EOS])
    with pytest.raises(UserError, match=r"data\.seq_len: a row of 4 tokens .* is longer than the \d tokens of .*\.bin"):
        Rows(tokens, 4, packing, EOS)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("row", [-1, 2])
def test_rows_outside_are_refused(token_file: Maker, packing: PackingName, row: int) -> None:
    rows = Rows(token_file([2, 3, 4, 5, EOS]), 2, packing, EOS)
    assert len(rows) == 2
    with pytest.raises(IndexError):
        rows.take(np.array([row]))


def test_padding_is_masked(token_file: Maker) -> None:
    rows = Rows(token_file([2, 3, 4, 5, EOS]), 2, "concat", EOS)
    batch = followed_by(rows.take(np.array([0])), Batch.padding(2, 2, EOS))
    assert batch.tokens.tolist() == [[2, 3], [EOS, EOS], [EOS, EOS]]
    assert batch.mask.sum(axis=1).tolist() == [2, 0, 0]


def test_best_fit_fills_rows_with_whole_documents(token_file: Maker) -> None:
    """With the mask, a row has the predictions of its documents one after the other, and then padding."""
    documents = [10, 11, 12, EOS], [20, EOS], [30, 31, 32, 33, 34, 35, 36, EOS], [40, 41, EOS]
    rows = Rows(token_file(*documents), 5, "best_fit", EOS, document_mask=True)
    batch = rows.take(np.arange(len(rows)))
    # Document 2 has seven predictions: a full row, and two that are left. 3 + 2 fit together, and so do 2 + 1.
    assert batch.tokens.tolist() == [[30, 31, 32, 33, 34], [10, 11, 12, 35, 36], [20, 40, 41, 1, 1]]
    assert batch.targets.tolist() == [[31, 32, 33, 34, 35], [11, 12, EOS, 36, EOS], [EOS, 41, EOS, 1, 1]]
    assert batch.mask.tolist() == [[True] * 5, [True] * 5, [True, True, True, False, False]]
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 2, 2]]
    assert batch.documents.dtype == np.int32
    assert str(rows.fill()) == "13.33% padding, 1 of 4 documents cut"


def test_best_fit_without_the_mask_shows_where_a_document_ends(token_file: Maker) -> None:
    """The end-of-document token is an input between two documents, and nothing is predicted from it."""
    rows = Rows(token_file([10, 11, 12, EOS], [20, EOS], [40, 41, EOS]), 6, "best_fit", EOS)
    batch = rows.take(np.arange(len(rows)))
    assert batch.tokens.tolist() == [[10, 11, 12, EOS, 40, 41], [20, 1, 1, 1, 1, 1]]
    assert batch.mask.tolist() == [[True, True, True, False, True, True], [True] + [False] * 5]
    assert batch.targets[batch.mask].tolist() == [11, 12, EOS, 41, EOS, EOS]
    assert batch.documents is None


def test_concat_with_the_mask_predicts_no_first_token(token_file: Maker) -> None:
    documents = [10, 11, EOS], [], [20, EOS], [30, 31, 32, 33, 34, EOS], [40, 41, EOS]
    rows = Rows(token_file(*documents), 4, "concat", EOS, document_mask=True)
    batch = rows.take(np.arange(len(rows)))
    assert batch.tokens.tolist() == [[10, 11, EOS, 20], [EOS, 30, 31, 32], [33, 34, EOS, 40]]
    assert batch.mask.tolist() == [[True, True, False, True], [False, True, True, True], [True, True, False, True]]
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1]]
    without = Rows(token_file(*documents), 4, "concat", EOS).take(np.arange(3))
    assert np.array_equal(without.tokens, batch.tokens)
    assert np.array_equal(without.targets, batch.targets)
    assert without.mask.all()
    assert without.documents is None


def numbered(seed: int) -> tuple[list[list[int]], dict[int, int]]:
    """Documents in which every token is another number, and the document of each."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 2, 3, 5, 9, 30], size=60)
    tokens = iter(range(2, 10_000))
    documents = [[next(tokens) for _ in range(n)] for n in lengths]
    return documents, {token: i for i, document in enumerate(documents) for token in document}


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seq_len", [1, 2, 5, 8, 64])
def test_what_a_row_says_of_its_tokens_is_true(
    token_file: Maker, packing: PackingName, seq_len: int, document_mask: bool
) -> None:
    documents, of_token = numbered(seq_len)
    rows = Rows(token_file(*documents, dtype="int32"), seq_len, packing, EOS, document_mask)
    batch = rows.take(np.arange(len(rows)))
    whole = packing == "concat" and not document_mask
    predicted = batch.targets[batch.mask].tolist()
    assert len(set(predicted)) == len(predicted)
    for token, target in zip(batch.tokens[batch.mask].tolist(), predicted, strict=True):
        assert target == token + 1
        assert whole or of_token[token] == of_token[target]
    everything = [t for d in documents for t in d][: len(rows) * seq_len + 1 if packing == "concat" else None]
    firsts = {everything[0]} if whole else {d[0] for d in documents if d}
    assert sorted(predicted) == [t for t in everything if t not in firsts]
    if not document_mask:
        assert batch.documents is None
        return
    assert batch.documents is not None
    for tokens, numbers, mask in zip(batch.tokens, batch.documents, batch.mask, strict=True):
        real = int(np.flatnonzero(tokens != EOS)[-1]) + 1
        ours = [of_token[token] for token in tokens[:real].tolist()]
        expected = [sorted(set(ours), key=ours.index).index(document) for document in ours]
        assert numbers[:real].tolist() == expected
        assert (numbers[real:] == expected[-1] + 1).all()
        assert not mask[real:].any()


@pytest.mark.parametrize("packing", PACKINGS)
def test_fill_counts_what_rows_show(token_file: Maker, packing: PackingName) -> None:
    documents, of_token = numbered(3)
    rows = Rows(token_file(*documents, dtype="int32"), 7, packing, EOS, document_mask=packing == "best_fit")
    batch, fill = rows.take(np.arange(len(rows))), rows.fill()
    assert fill.padding == pytest.approx((batch.tokens == EOS).mean())
    rows_of: dict[int, set[int]] = {}
    for row, place in np.argwhere(batch.mask):
        token, target = int(batch.tokens[row, place]), int(batch.targets[row, place])
        if of_token[token] == of_token[target]:
            rows_of.setdefault(of_token[token], set()).add(int(row))
    # The stream's last tokens fill no row of `concat`, and may be the rest of a document that has one.
    assert 0 <= fill.cut - sum(len(found) > 1 for found in rows_of.values()) <= (packing == "concat")
    assert fill.documents == 60


def test_padding_rows_have_documents_where_others_have() -> None:
    batch = Batch.padding(2, 3, EOS, document_mask=True)
    assert batch.documents is not None
    assert followed_by(batch, batch).documents is not None
    assert Batch.padding(2, 3, EOS).documents is None
