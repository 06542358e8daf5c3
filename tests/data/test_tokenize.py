"""The tokenizing job: what it writes depends on nothing but its words."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from data import encode
from data import tokenize as module
from data.dataset import Dataset
from data.encode import Encoder
from data.manifest import JOURNAL, MANIFEST, listed_files
from data.prepare import PreparedData
from data.split import Split
from data.tokenizer import Tokenizer
from tests.data.jobs import content, job, megatron_documents, run, shards, texts

pytestmark = pytest.mark.usefixtures("no_fsync")


def test_an_independent_reader_finds_the_source(unbroken: Path, paragraphs: Path, tokenizer: Tokenizer) -> None:
    """Document by document, with a reader that knows only Megatron's format."""
    split = list(Split.at(0.1).apply(texts(paragraphs)))
    manifest = json.loads((unbroken / MANIFEST).read_text())
    for name, held_out in (("train", False), ("eval", True)):
        expected = [text for held, text in split if held == held_out]
        listed = [shard["name"] for shard in manifest["splits"][name]["shards"]]
        assert listed == sorted(path.stem for path in unbroken.glob(f"{name}-*.bin"))
        read = [ids for shard in listed for ids in megatron_documents(unbroken / shard)]
        assert len(listed) > 3
        assert [tokenizer.decode(ids[:-1]) for ids in read] == expected
        assert {ids[-1] for ids in read} == {tokenizer.eos_id}
        counts = {
            "documents": len(read),
            "tokens": sum(map(len, read)),
            "bytes": sum(len(t.encode()) for t in expected),
        }
        assert counts.items() <= manifest["splits"][name].items()


def test_shards_end_with_the_document_that_fills_them(unbroken: Path, paragraphs: Path) -> None:
    manifest = json.loads((unbroken / MANIFEST).read_text())
    groups: dict[str, list[dict[str, Any]]] = {}
    for split in ("train", "eval"):
        for shard in manifest["splits"][split]["shards"]:
            groups.setdefault(shard["name"][-5:], []).append(shard)
    n_records = -1
    for number, group in sorted(groups.items()):
        documents = {shard["name"]: megatron_documents(unbroken / shard["name"]) for shard in group}
        last = max(group, key=lambda shard: shard["last"])
        tokens = sum(shard["tokens"] for shard in group)
        assert tokens - len(documents[last["name"]][-1]) < 4000
        assert tokens >= 4000 or number == max(groups)
        # One group goes on where the other ended.
        assert min(shard["first"] for shard in group)[1] == n_records + 1
        n_records = last["last"][1]
        assert all(shard["documents"] == len(documents[shard["name"]]) for shard in group)
    assert n_records == len(texts(paragraphs)) - 1
    assert manifest["sources"] == [
        {"file": str(paragraphs), "bytes": paragraphs.stat().st_size, "documents": n_records + 1}
    ]


def test_every_container_gives_the_same_shards(
    unbroken: Path, paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    import pyarrow
    import pyarrow.parquet
    import zstandard

    raw = paragraphs.read_bytes()
    table = pyarrow.table({"text": texts(paragraphs)})
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(raw))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=50)
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"):
        run(tmp_path / "tokens" / name, job([tmp_path / name], tokenizer))
        assert shards(tmp_path / "tokens" / name) == shards(unbroken), name


@pytest.mark.parametrize("workers", [1, 2])
def test_output_does_not_depend_on_the_workers(
    unbroken: Path,
    paragraphs: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor on the size of the chunks that they get."""
    monkeypatch.setattr(module, "CHUNK_CHARS", 700 * workers)
    started: list[int] = []
    in_processes = encode.encode_in_processes
    monkeypatch.setattr(
        module, "encode_in_processes", lambda *words: (started.append(words[2]), in_processes(*words))[1]
    )
    run(tmp_path / "tokens", job([paragraphs], tokenizer), workers)
    assert started == [2] * (workers - 1)
    assert content(tmp_path / "tokens") == content(unbroken)


def test_an_id_outside_the_vocabulary_is_never_written(
    paragraphs: Path, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        max_id, eos_id = 600, 1

        def encode(self, texts: list[str], threads: int | None = None) -> list[list[int]]:
            return [[5, 601] for _ in texts]

    monkeypatch.setattr(encode, "load_tokenizer", lambda path: Broken())
    with pytest.raises(UserError, match=r"tokenizer\.model: gave token id 601, but its ids are 0 to 600"):
        run(tmp_path / "tokens", job([paragraphs], prepared.tokenizer()))
    assert {path.name for path in (tmp_path / "tokens").iterdir()} == {".lock", JOURNAL, "tokenizer.model"}


def test_ids_up_to_the_largest_fit_their_type(tmp_path: Path) -> None:
    class Large:
        eos_id = 0

        def __init__(self, max_id: int) -> None:
            self.max_id = max_id

        def encode(self, texts: list[str], threads: int | None = None) -> list[list[int]]:
            return [[self.max_id] for _ in texts]

    for dtype, largest in (("uint16", 65_499), ("int32", 65_500), ("int32", 2**31 - 1)):
        encoded = Encoder(tmp_path, Split.at(0.0), dtype).encode(Large(largest), ["a", "b"], 1)  # type: ignore[arg-type]
        assert encoded.tokens.tolist() == [largest, 0, largest, 0]
        assert encoded.tokens.dtype == np.dtype(dtype)


def test_no_document_at_all_is_one_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(UserError, match=r"--input: no document with any text in .*a\.jsonl"):
        run(tmp_path / "tokens", job([tmp_path / "a.jsonl"], tokenizer))


def test_the_share_held_out(paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    everything = len(texts(paragraphs))
    for fraction, held_out in ((0.0, 0), (1.0, everything)):
        run(tmp_path / str(fraction), job([paragraphs], tokenizer, eval_fraction=fraction))
        dataset = Dataset.open(tmp_path / str(fraction))
        assert (dataset.train.n_documents, dataset.eval.n_documents) == (everything - held_out, held_out)
        empty = dataset.train if held_out else dataset.eval
        assert empty.slice(0, 0).size == empty.n_tokens == 0
        assert empty.document_starts.tolist() == [0]


def test_the_manifest_answers_for_every_file(unbroken: Path) -> None:
    manifest = json.loads((unbroken / MANIFEST).read_text())
    assert {*listed_files(manifest), MANIFEST, ".lock"} == {path.name for path in unbroken.iterdir()}
