from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from data.shards import TokenFile, TokenWriter

DOCUMENTS = [[5, 6, 7, 1], [8, 1], [65_535, 0, 1]]


def megatron_documents(prefix: Path) -> list[list[int]]:
    """An independent reader of Megatron's format, one field after the other."""
    index = prefix.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<Q", index, 9) == (1,)
    letter = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[index[17]]
    n_sequences, n_index = struct.unpack_from("<QQ", index, 18)
    place = 34
    lengths = struct.unpack_from(f"<{n_sequences}i", index, place)
    place += 4 * n_sequences
    pointers = struct.unpack_from(f"<{n_sequences}q", index, place)
    place += 8 * n_sequences
    bounds = struct.unpack_from(f"<{n_index}q", index, place)
    assert place + 8 * n_index == len(index)
    content = prefix.with_suffix(".bin").read_bytes()
    sequences = [list(struct.unpack_from(f"<{n}{letter}", content, p)) for n, p in zip(lengths, pointers, strict=True)]
    return [list(itertools.chain(*sequences[a:b])) for a, b in itertools.pairwise(bounds)]


def write_index(path: Path, code: int, lengths: list[int], bounds: list[int], size: int, version: int = 1) -> None:
    """An index as another program would write it."""
    pointers = [size * sum(lengths[:i]) for i in range(len(lengths))]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(lengths), len(bounds))
    path.write_bytes(
        header + struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(bounds)}q", *lengths, *pointers, *bounds)
    )


@pytest.mark.parametrize(("dtype", "code"), [("uint16", 8), ("int32", 4)])
def test_an_independent_reader_reads_ours(token_file: Callable[..., TokenFile], dtype: str, code: int) -> None:
    tokens = token_file(*DOCUMENTS, dtype=dtype)
    assert megatron_documents(tokens.bin_path.with_suffix("")) == DOCUMENTS
    assert tokens.idx_path.read_bytes()[17] == code


def test_we_read_ours(token_file: Callable[..., TokenFile]) -> None:
    tokens = token_file(*DOCUMENTS)
    assert tokens.dtype == np.uint16
    assert (tokens.n_tokens, tokens.n_documents, tokens.lengths.tolist()) == (9, 3, [4, 2, 3])
    assert [tokens.document(i).tolist() for i in range(3)] == DOCUMENTS
    assert tokens.slice(3, 7).tolist() == [1, 8, 1, 65_535]
    assert tokens.slice(9, 9).size == 0
    for start, stop in ((0, 10), (-1, 2), (3, 2)):
        with pytest.raises(IndexError):
            tokens.slice(start, stop)
    with pytest.raises(IndexError):
        tokens.document(3)


def test_we_read_documents_of_several_sequences(tmp_path: Path) -> None:
    write_index(tmp_path / "x.idx", 5, [2, 1, 3], [0, 2, 3], size=8)
    (tmp_path / "x.bin").write_bytes(np.arange(6, dtype="<i8").tobytes())
    tokens = TokenFile(tmp_path / "x")
    assert [tokens.document(i).tolist() for i in range(tokens.n_documents)] == [[0, 1, 2], [3, 4, 5]]
    assert megatron_documents(tmp_path / "x") == [[0, 1, 2], [3, 4, 5]]


def test_no_documents(token_file: Callable[..., TokenFile]) -> None:
    tokens = token_file()
    assert (tokens.n_tokens, tokens.n_documents) == (0, 0)


@pytest.mark.parametrize(("dtype", "token"), [("uint16", 65_536), ("uint16", -1), ("int32", 2**31)])
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, dtype: str, token: int) -> None:
    with pytest.raises(ValueError, match=f"{token}.* do not fit {dtype}"), TokenWriter(tmp_path / "x", dtype) as writer:
        writer.append([token])
    assert list(tmp_path.iterdir()) == []


def test_names_appear_at_the_end(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "a.b", "uint16") as writer:
        writer.append([1])
        assert not (tmp_path / "a.b.bin").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"a.b.bin", "a.b.idx"}


def test_damage_is_named(token_file: Callable[..., TokenFile], tmp_path: Path) -> None:
    files = token_file(*DOCUMENTS)
    whole = files.idx_path.read_bytes()

    def refused(index: bytes, message: str) -> None:
        files.idx_path.write_bytes(index)
        with pytest.raises(UserError, match=message):
            TokenFile(tmp_path / "tokens")

    refused(b"X" + whole[1:], r"tokens\.idx: not a Megatron index")
    refused(whole[:20], r"tokens\.idx: not a Megatron index")
    refused(whole[:9] + b"\2" + whole[10:], r"tokens\.idx: index version 2; only version 1")
    refused(whole[:17] + b"\7" + whole[18:], r"tokens\.idx: type code 7 is no integer type")
    refused(whole[:17] + b"\0" + whole[18:], r"tokens\.idx: type code 0 is no integer type")
    refused(whole[:-1], r"tokens\.idx: 101 bytes where the index says 102")
    refused(whole[:46] + b"\4" + whole[47:], r"tokens\.idx: its lengths, pointers and document index do not agree")
    refused(whole[:-8] + b"\2" + whole[-7:], r"tokens\.idx: its lengths, pointers and document index do not agree")
    files.idx_path.write_bytes(whole)
    files.bin_path.write_bytes(files.bin_path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"tokens\.bin: 17 bytes where the index says 18"):
        TokenFile(tmp_path / "tokens")
    files.bin_path.unlink()
    with pytest.raises(UserError, match=r"tokens\.bin: no such token file"):
        TokenFile(tmp_path / "tokens")
