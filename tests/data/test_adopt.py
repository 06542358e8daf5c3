"""Token files that others made, as a dataset folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from data.adopt import adopt
from data.dataset import Dataset
from data.manifest import MANIFEST
from data.statistics import summary
from data.tokenizers.byte import ByteTokenizer
from data.verify import verify
from launch.data import run_adopt
from tests.data.test_shards import write_index

EOS = 256


def foreign(prefix: Path, documents: list[list[list[int]]], code: int = 4) -> Path:
    """Token files as another program would write them, each document in some sequences; int32, or of another code."""
    sequences = [sequence for document in documents for sequence in document]
    bounds = [sum(len(document) for document in documents[:i]) for i in range(len(documents) + 1)]
    dtype = np.dtype({4: "<i4", 5: "<i8", 8: "<u2"}[code])
    write_index(prefix.with_suffix(".idx"), code, [len(s) for s in sequences], bounds, dtype.itemsize)
    prefix.with_suffix(".bin").write_bytes(np.array([i for s in sequences for i in s], dtype=dtype).tobytes())
    return prefix


@pytest.mark.parametrize("code", [4, 5, 8])
@pytest.mark.parametrize("linked", [True, False])
def test_a_folder_of_them(
    tmp_path: Path, code: int, linked: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not linked:

        def refuse(*_: object) -> None:
            raise OSError

        monkeypatch.setattr(os, "link", refuse)
    a = foreign(tmp_path / "a", [[[97, 98], [99, EOS]], [[100, EOS]]], code)
    b = foreign(tmp_path / "b", [[[101, 102, EOS]]], code)
    run_adopt([a.with_suffix(".bin"), b], [b], Path("bytes"), None, tmp_path / "out")
    assert "out: 3 documents, 9 tokens to train on; 1 documents, 3 tokens held out" in capsys.readouterr().out
    data = Dataset.open(tmp_path / "out")
    assert [data.train.document(i).tolist() for i in range(3)] == [[97, 98, 99, EOS], [100, EOS], [101, 102, EOS]]
    assert data.eval.document(0).tolist() == [101, 102, EOS]
    assert data.tokenizer().decode(data.train.document(0)) == "abc"
    assert [summary(data, "train")[what] for what in ("documents", "tokens", "bytes")] == [3, 9, 6]
    assert [row["documents"] for row in summary(data, "train")["lengths"]] == [2, 1]
    assert not verify(tmp_path / "out", 1).problems
    assert os.path.samefile(tmp_path / "a.bin", tmp_path / "out" / "train-00000.bin") == linked


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[[97, EOS]], [[98, 97]]], f"document 1 does not end with the tokenizer's id {EOS}"),
        ([[[97, EOS]], []], "document 1 does not end with"),
        ([[[97, 257, EOS]]], "has the token id 257, and the tokenizer 257 ids"),
        ([[[97, -1, EOS]]], "has the token id -1,"),
        ([], "holds no document"),
    ],
)
def test_what_the_tokenizer_did_not_make(tmp_path: Path, documents: list[list[list[int]]], message: str) -> None:
    prefix = foreign(tmp_path / "a", documents)
    with pytest.raises(UserError, match=f"a.bin: {message}"):
        run_adopt([prefix], [], Path("bytes"), None, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_wrong_files(tmp_path: Path) -> None:
    a, b = foreign(tmp_path / "a", [[[EOS]]]), foreign(tmp_path / "b", [[[EOS]]], code=8)
    with pytest.raises(UserError, match=r"b.bin: uint16 tokens, but .*a.bin has int32"):
        adopt(tmp_path, {"train": [a, b]}, ByteTokenizer())
    a.with_suffix(".bin").write_bytes(bytes(3))
    with pytest.raises(UserError, match=r"a.bin: 3 bytes where the index says 4"):
        adopt(tmp_path, {"train": [a]}, ByteTokenizer())
    assert not (tmp_path / MANIFEST).exists()
    with pytest.raises(UserError, match=r"a: token files, and no dataset folder; `gramian data adopt .*a --tokenizer"):
        Dataset.open(a)
