from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from common.errors import UserError
from data.packing import Batch, Rows
from data.shards import TokenFile

EOS = 1
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


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_less_than_a_row_is_an_error(token_file: Maker, packing: str) -> None:
    tokens = token_file([5, 6, 7, EOS]) if packing == "concat" else token_file([EOS])
    with pytest.raises(UserError, match=r"data\.seq_len: a row of 4 tokens .* is longer than the \d tokens of .*\.bin"):
        Rows(tokens, 4, packing, EOS)  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", ["concat", "pad"])
@pytest.mark.parametrize("row", [-1, 2])
def test_rows_outside_are_refused(token_file: Maker, packing: str, row: int) -> None:
    rows = Rows(token_file([2, 3, 4, 5, EOS]), 2, packing, EOS)  # type: ignore[arg-type]
    assert len(rows) == 2
    with pytest.raises(IndexError):
        rows.take(np.array([row]))


def test_padding_is_masked(token_file: Maker) -> None:
    rows = Rows(token_file([2, 3, 4, 5, EOS]), 2, "concat", EOS)
    batch = rows.take(np.array([0])).followed_by(Batch.padding(2, 2, EOS))
    assert batch.tokens.tolist() == [[2, 3], [EOS, EOS], [EOS, EOS]]
    assert batch.mask.sum(axis=1).tolist() == [2, 0, 0]
