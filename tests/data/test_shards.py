from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from data.shards import TokenFile, TokenWriter, dtype_for
from tests.data.jobs import megatron_documents

DOCUMENTS = [[5, 6, 7, 1], [8, 1], [65_535, 0, 1]]


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


@pytest.mark.parametrize(("n_ids", "dtype"), [(65_499, "uint16"), (65_500, "int32"), (65_537, "int32")])
def test_dtype_is_megatrons(n_ids: int, dtype: str) -> None:
    assert dtype_for(n_ids) == dtype


def test_documents_given_together_are_those_given_one_by_one(tmp_path: Path) -> None:
    tokens, lengths = np.concatenate([np.array(d) for d in DOCUMENTS]), np.array([len(d) for d in DOCUMENTS])
    with TokenWriter(tmp_path / "one", "uint16") as one, TokenWriter(tmp_path / "all", "uint16") as together:
        for document in DOCUMENTS:
            one.append(document)
        together.extend(tokens, lengths)
        assert (together.n_documents, together.n_tokens) == (3, 9)
    for end in (".bin", ".idx"):
        assert (tmp_path / f"one{end}").read_bytes() == (tmp_path / f"all{end}").read_bytes()
        assert together.files[f"all{end}"]["bytes"] == (tmp_path / f"all{end}").stat().st_size
    with pytest.raises(ValueError, match="for 9 tokens"), TokenWriter(tmp_path / "x", "uint16") as writer:
        writer.extend(tokens, lengths[:2])


def test_places_beyond_two_gibibytes(tmp_path: Path) -> None:
    """Three documents of 2**30 tokens: the last begins at byte 2**32, and at token 2**31. The file is sparse."""
    with TokenWriter(tmp_path / "big", "uint16") as writer:
        writer._lengths.extend([2**30] * 3)  # without their tokens, which nobody has room for
    with open(tmp_path / "big.bin", "wb") as file:
        for token in (0, 2**30 - 1, 2**30, 2**31, 3 * 2**30 - 2):
            file.seek(2 * token)
            file.write(struct.pack("<H", token % 65_521))
        file.truncate(6 * 2**30)
    tokens = TokenFile(tmp_path / "big")
    assert (tokens.n_tokens, tokens.document_starts.tolist()) == (3 * 2**30, [0, 2**30, 2**31, 3 * 2**30])
    assert tokens.document(1)[:2].tolist() == [2**30 % 65_521, 0]
    assert tokens.document(2)[:2].tolist() == [2**31 % 65_521, 0]
    assert tokens.slice(3 * 2**30 - 2, 3 * 2**30).tolist() == [(3 * 2**30 - 2) % 65_521, 0]
    pointers = struct.unpack_from("<3q", (tmp_path / "big.idx").read_bytes(), 34 + 12)
    assert pointers == (0, 2**31, 2**32)
