from __future__ import annotations

import pytest

from common.errors import UserError
from data.split import Split


def split(documents: list[str], fraction: float) -> tuple[list[str], list[str]]:
    pairs = list(Split.plan(documents, fraction).apply(documents))
    return [text for held_out, text in pairs if not held_out], [text for held_out, text in pairs if held_out]


def test_share_is_the_fraction_and_stays_put_when_documents_are_added() -> None:
    documents = [f"document {i}" for i in range(5000)]
    train, held_out = split(documents, 0.1)
    assert len(train) + len(held_out) == 5000
    assert 400 < len(held_out) < 600
    assert set(split(documents[::-1] + [f"new {i}" for i in range(500)], 0.1)[1]) >= set(held_out)


def test_duplicates_lie_on_one_side() -> None:
    train, held_out = split([f"document {i % 50}" for i in range(500)], 0.2)
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("fraction", [1e-9, 0.02, 0.499])
@pytest.mark.parametrize("n", [2, 3, 10])
def test_neither_side_is_empty(n: int, fraction: float) -> None:
    for salt in range(20):
        train, held_out = split([f"{salt} {i}" for i in range(n)], fraction)
        assert train
        assert held_out


def test_one_document_gives_its_end() -> None:
    assert split(["0123456789"], 0.2) == (["01234567"], ["89"])
    assert split(["ab"], 0.01) == (["a"], ["b"])
    assert split(["0123456789"] * 2, 0.2) == (["01234567"] * 2, ["89"] * 2)


def test_one_character_is_too_little() -> None:
    with pytest.raises(UserError, match=r"data\.corpus: one character"):
        split(["a"], 0.1)


def test_bytes_are_counted() -> None:
    assert Split.plan(["ü", "abc"], 0.1).n_bytes == 5
