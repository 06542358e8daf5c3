"""Files that are cut or damaged, and columns of every kind: a shorter corpus must never come of them in silence."""

from __future__ import annotations

import gzip
import io
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pyarrow import ipc

from common.errors import UserError
from data.formats import tables
from data.formats.lines import _ZstFrames
from data.readers import Source
from tests.data import containers
from tests.data.containers import Maker

TEXTS = [f"document {i} \u00e9 " * (i % 7 + 1) for i in range(40)]


def texts_of(path: Path | str, **options: float) -> list[str]:
    return [document.text for document in Source([path], **options).documents()]  # type: ignore[arg-type]


def one_member(folder: Path, texts: list[str]) -> str:
    (folder / "one.jsonl.gz").write_bytes(gzip.compress(containers.lines(texts)))
    return str(folder / "one.jsonl.gz")


def one_frame(folder: Path, texts: list[str]) -> str:
    (folder / "one.jsonl.zst").write_bytes(
        zstandard.ZstdCompressor(write_checksum=True).compress(containers.lines(texts))
    )
    return str(folder / "one.jsonl.zst")


CONTAINERS = (
    one_member,
    one_frame,
    containers.parquet,
    containers.parquet_of_one_group,
    containers.arrow_stream,
    containers.arrow_file,
)
by_container = pytest.mark.parametrize("make", CONTAINERS, ids=lambda make: make.__name__)


@by_container
def test_a_file_cut_anywhere_is_an_error(make: Maker, tmp_path: Path) -> None:
    """Also with bad records allowed: what is missing is no bad record."""
    path = Path(make(tmp_path, TEXTS))
    content = path.read_bytes()
    for size in {*range(0, len(content), max(1, len(content) // 150)), *range(len(content) - 20, len(content))}:
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=rf"^{path}: cut short or damaged after \d+ records \(.+\); fetch or make"):
            texts_of(path, max_bad_share=1.0)
    path.write_bytes(content)
    assert texts_of(path) == TEXTS


def test_arrow_cut_between_batches(tmp_path: Path) -> None:
    """Where the library takes the end of the file for the end of the stream."""
    path = Path(containers.arrow_stream(tmp_path, TEXTS))
    content = path.read_bytes()
    cuts = [i for i in range(len(content) - 8) if content.startswith(b"\xff\xff\xff\xff", i)][1:]
    silent = 0
    for cut in cuts:
        path.write_bytes(content[:cut])
        with ipc.open_stream(path.read_bytes()) as reader:
            silent += reader.read_all().num_rows < len(TEXTS)
        with pytest.raises(UserError, match="its end mark is missing"):
            texts_of(path)
    assert silent == len(cuts) >= 9


def test_zst_cut_in_the_second_frame(tmp_path: Path) -> None:
    """Where the library takes the end of the file for the end of the content; the first frame's records are counted."""
    frames = [zstandard.ZstdCompressor().compress(containers.lines(TEXTS[i : i + 20])) for i in (0, 20)]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join(frames)[:-4])
    with open(path, "rb") as raw:
        stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        assert stream.read().count(b"\n") == 20
    with pytest.raises(
        UserError, match=r"a\.jsonl\.zst: cut short or damaged after 20 records \(it ends inside a frame"
    ):
        texts_of(path)


@pytest.mark.parametrize("make", [one_member, one_frame], ids=lambda make: make.__name__)
def test_flipped_bits_and_what_follows_are_errors(make: Maker, tmp_path: Path) -> None:
    """Both formats carry checksums here; what follows at the end is no part of them either."""
    path = Path(make(tmp_path, TEXTS))
    content = path.read_bytes()
    path.write_bytes(content + b"junk")
    with pytest.raises(UserError, match=r"cut short or damaged after \d+ records"):
        texts_of(path)
    generator = random.Random(0)
    for _ in range(100):
        place = generator.randrange(20, len(content))
        damaged = bytearray(content)
        damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            texts_of(path)


def test_damage_in_a_page_of_parquet_is_found_where_it_has_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(containers.table(TEXTS), path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = path.read_bytes()
    place = content.index(TEXTS[20].encode())
    path.write_bytes(content[:place] + b"D" + content[place + 1 :])
    with pytest.raises(
        UserError, match=r"a\.parquet: cut short or damaged after 0 records \(could not verify page integrity"
    ):
        texts_of(path)


def test_errors_of_the_system_are_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(one_frame(tmp_path, TEXTS))

    def failing(_: object, buffer: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(_ZstFrames, "readinto", failing)
    with pytest.raises(UserError, match=r"--input: cannot read .*one\.jsonl\.zst: Input/output error"):
        texts_of(path)


def test_zst_of_the_widest_window(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    path = tmp_path / "a.jsonl.zst"
    # A stream does not know its size, so that its frame asks for the whole window.
    packed = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(packed, closefd=False) as writer:
        writer.write(containers.lines(TEXTS))
    path.write_bytes(packed.getvalue())
    with pytest.raises(zstandard.ZstdError):
        zstandard.ZstdDecompressor().stream_reader(packed.getvalue()).read()
    assert texts_of(path) == TEXTS


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.large_string())],
    ids=str,
)
def test_columns_of_every_kind_of_text(kind: pa.DataType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_BATCH_BYTES", 200)  # so that batches are cut
    monkeypatch.setattr(tables, "_BATCH_ROWS", 3)
    rows = pa.table({"text": pa.array(TEXTS, pa.string()).cast(kind)})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=11)
    with ipc.new_file(tmp_path / "a.arrow", rows.schema) as writer:
        writer.write_table(rows)
    for name in ("a.parquet", "a.arrow"):
        source = Source([tmp_path / name])
        documents = list(source.documents())
        assert [document.text for document in documents] == TEXTS
        for i in (1, 10, 11, 25, 39):
            assert list(source.documents(documents[i].at)) == documents[i:]


def test_rows_without_text_are_bad_records(tmp_path: Path) -> None:
    """Null, and bytes that are no UTF-8, which a column of texts can hold all the same."""
    texts = pa.array([b"fine", None, b"caf\xe9", b"caf\xc3\xa9", b"\xed\xa0\x80"], pa.binary())
    rows = pa.table(
        {"text": pa.StringArray.from_buffers(5, texts.buffers()[1], texts.buffers()[2], texts.buffers()[0])}
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    with ipc.new_stream(tmp_path / "a.arrow", rows.schema) as writer:
        writer.write_table(rows)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(UserError, match=rf"{name}: record 2: no text \(null\)"):
            texts_of(tmp_path / name)
        assert texts_of(tmp_path / name, max_bad_share=0.6) == ["fine", "café"]
        source = Source([tmp_path / name], max_bad_share=0.6)
        assert [document.at.record for document in source.documents()] == [0, 3]
        assert source.skipped == {"bad": 3}


def test_columns_and_lines_without_documents(tmp_path: Path) -> None:
    pq.write_table(containers.table([]), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_bytes(b"\n \n")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b""))
    with ipc.new_file(tmp_path / "d.arrow", containers.table([]).schema):
        pass
    (tmp_path / "e.txt").write_text("e")
    source = Source([tmp_path])
    assert [document.text for document in source.documents()] == ["e"]
    assert source.records == 1
