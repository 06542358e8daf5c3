from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.dataset import Dataset, TokenStream
from data.prepare import PreparedData
from data.shards import TokenWriter
from data.statistics import length_histogram, samples, summary


def test_histogram_bins_are_powers_of_two(tmp_path: Path) -> None:
    lengths = [1, 1, 2, 3, 4, 7, 8, 1023, 1024, 1025]
    for name, part in (("a", lengths[:4]), ("b", lengths[4:])):
        with TokenWriter(tmp_path / name, "uint16") as writer:
            for length in part:
                writer.append(np.ones(length, dtype=np.int64))
    documents, tokens = length_histogram(TokenStream.of_files([tmp_path / "a", tmp_path / "b"]))
    assert {k: int(documents[k]) for k in np.flatnonzero(documents)} == {0: 2, 1: 2, 2: 2, 3: 1, 9: 1, 10: 2}
    assert {k: int(tokens[k]) for k in np.flatnonzero(tokens)} == {0: 2, 1: 5, 2: 11, 3: 8, 9: 1023, 10: 2049}


def test_summary_adds_up(prepared: PreparedData) -> None:
    for split in ("train", "eval"):
        found = summary(prepared, split)
        stream = getattr(prepared, split)
        assert (found["documents"], found["tokens"], found["shards"]) == (stream.n_documents, stream.n_tokens, 1)
        assert sum(row["documents"] for row in found["lengths"]) == stream.n_documents
        assert sum(row["tokens"] for row in found["lengths"]) == stream.n_tokens
        assert found["bytes_per_token"] == pytest.approx(found["bytes"] / found["tokens"])
        for row in found["lengths"]:
            inside = (stream.lengths >= row["from"]) & (stream.lengths <= row["to"])
            assert row["documents"] == inside.sum()


def test_samples_are_spread_and_decoded(prepared: PreparedData) -> None:
    tokenizer, stream = prepared.tokenizer(), prepared.train
    found = list(samples(stream, tokenizer, 3, 20))
    n = stream.n_documents
    assert [sample["document"] for sample in found] == [n // 6, n // 2, 5 * n // 6]
    for sample in found:
        ids = stream.document(sample["document"])
        assert sample["tokens"] == len(ids)
        assert sample["text"] == tokenizer.decode(ids[:20])
    assert len(list(samples(stream, tokenizer, n + 5, 20))) == n
    assert list(samples(Dataset.open(prepared.folder).eval, tokenizer, 0, 20)) == []
