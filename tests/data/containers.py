"""The same documents in every kind of file that is read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pyarrow import ipc

Maker = Callable[[Path, Sequence[str]], str]  # writes texts under a folder and returns the name of the input


def lines(texts: Sequence[str]) -> bytes:
    """A JSONL file, with other fields around the text."""
    rows = [{"id": i, "text": text, "meta": {"text": "not this"}} for i, text in enumerate(texts)]
    return "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows)).encode("utf-8")


def table(texts: Sequence[str], kind: pa.DataType | None = None) -> pa.Table:
    """A table with another column on each side of the text."""
    return pa.table({"id": range(len(texts)), "text": pa.array(texts, kind or pa.string()), "more": list(texts)})


def jsonl(folder: Path, texts: Sequence[str]) -> str:
    (folder / "x.jsonl").write_bytes(lines(texts))
    return str(folder / "x.jsonl")


def gz(folder: Path, texts: Sequence[str]) -> str:
    """Of two members, one after the other, as parallel compressors write them; cut inside a line."""
    content = lines(texts)
    half = len(content) // 2
    (folder / "x.jsonl.gz").write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    return str(folder / "x.jsonl.gz")


def zst(folder: Path, texts: Sequence[str]) -> str:
    """Of three frames, an empty one among them, and one to skip in front (as pzstd writes)."""
    content, compressor = lines(texts), zstandard.ZstdCompressor()
    half = len(content) // 2
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    frames = [compressor.compress(part) for part in (content[:half], b"", content[half:])]
    (folder / "x.jsonl.zst").write_bytes(skippable + b"".join(frames))
    return str(folder / "x.jsonl.zst")


def parquet(folder: Path, texts: Sequence[str]) -> str:
    """In row groups of seven."""
    pq.write_table(table(texts), folder / "x.parquet", row_group_size=7)
    return str(folder / "x.parquet")


def parquet_of_one_group(folder: Path, texts: Sequence[str]) -> str:
    pq.write_table(table(texts, pa.large_string()), folder / "y.parquet", compression="zstd", use_dictionary=False)
    return str(folder / "y.parquet")


def arrow_stream(folder: Path, texts: Sequence[str]) -> str:
    with ipc.new_stream(folder / "x.arrow", table(texts).schema) as writer:
        writer.write_table(table(texts), max_chunksize=4)
    return str(folder / "x.arrow")


def arrow_file(folder: Path, texts: Sequence[str]) -> str:
    """With compressed buffers, and texts as numbers of a dictionary."""
    rows = table(texts, pa.dictionary(pa.int32(), pa.string())).combine_chunks()
    with ipc.new_file(folder / "y.arrow", rows.schema, options=ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(rows, max_chunksize=5)
    return str(folder / "y.arrow")


def saved(folder: Path, texts: Sequence[str]) -> str:
    """What `datasets` saves, in two files where there is enough."""
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"id": list(range(len(texts))), "text": list(texts)})
    rows.save_to_disk(folder / "saved", num_shards=min(2, len(texts)))
    return f"hf:{folder / 'saved'}"


def streamed(folder: Path, texts: Sequence[str]) -> str:
    """A folder that `datasets` streams, of two Parquet files where there is enough."""
    (folder / "streamed").mkdir()
    half = (len(texts) + 1) // 2
    for i, part in enumerate([texts[:half], texts[half:]] if len(texts) > 1 else [texts]):
        pq.write_table(table(part), folder / "streamed" / f"train-{i:05d}-of-00002.parquet")
    return f"hf:{folder / 'streamed'}"


IN_ONE_FILE: tuple[Maker, ...] = (jsonl, gz, zst, parquet, parquet_of_one_group, arrow_stream, arrow_file)
ALL: tuple[Maker, ...] = (*IN_ONE_FILE, saved, streamed)
