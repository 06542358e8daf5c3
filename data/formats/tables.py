"""Tables with a column of texts: Parquet, and Arrow's IPC file and stream. Of them only that column is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from data.formats.records import Problem, Progress, Record, TextField, read_to_the_end, refuse_empty

if TYPE_CHECKING:
    import pyarrow

_BATCH_BYTES = 8 << 20  # of text turned into Python's strings at once
_BATCH_ROWS = 4096
_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def parquet_records(path: Path, field: TextField, skip: int, progress: Progress) -> Iterator[Record]:
    """A row is a record. Row groups that are skipped are not read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with read_to_the_end(path, progress, pa.ArrowException):
        refuse_empty(path)
        # The column is read in pieces as it is needed; checksums of pages are optional, and checked where they are.
        options = {"buffer_size": 1 << 20, "pre_buffer": False, "page_checksum_verification": True}
        with pq.ParquetFile(path, **options) as file:
            _check_column(path, file.schema_arrow, field)
            size, n_rows = path.stat().st_size, file.metadata.num_rows
            progress.tell = lambda: size * progress.records // max(n_rows, 1)
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            group = 0
            while group < len(sizes) and progress.records + sizes[group] <= skip:
                progress.records += sizes[group]
                group += 1
            batches = file.iter_batches(
                _rows_at_once(file.metadata, field),
                row_groups=list(range(group, len(sizes))),
                columns=[field.name],
                use_threads=False,
            )
            for batch in batches:
                yield from _rows(path, batch.column(0), skip, progress)
            if progress.records != n_rows:
                raise EOFError(f"{n_rows:,} rows are announced")


def arrow_records(path: Path, field: TextField, skip: int, progress: Progress) -> Iterator[Record]:
    """A row is a record. The file is memory-mapped: batches that are skipped are not read from the disk."""
    import pyarrow as pa

    with read_to_the_end(path, progress, pa.ArrowException):
        refuse_empty(path)
        with pa.memory_map(str(path)) as mapped:
            size = mapped.size()
            is_file = mapped.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            column = _check_column(path, _opened(mapped, is_file, None).schema, field)
            reader = _opened(mapped, is_file, column)
            if is_file:
                for number in range(reader.num_record_batches):
                    place = size * (number + 1) // reader.num_record_batches
                    progress.tell = lambda place=place: place  # type: ignore[misc]
                    yield from _rows(path, reader.get_batch(number).column(0), skip, progress)
            else:
                for batch in reader:
                    place = mapped.tell()
                    progress.tell = lambda place=place: place  # type: ignore[misc]
                    yield from _rows(path, batch.column(0), skip, progress)
                mapped.seek(max(mapped.tell() - len(_STREAM_END), 0))
                if mapped.read(len(_STREAM_END)) != _STREAM_END:  # the library takes a cut between batches for the end
                    raise EOFError("its end mark is missing")
            progress.tell = lambda: size


def _opened(mapped: pyarrow.MemoryMappedFile, is_file: bool, column: int | None) -> Any:
    """Arrow's reader, from the beginning; of one column only, if its index is given."""
    from pyarrow import ipc

    mapped.seek(0)
    options = ipc.IpcReadOptions(included_fields=None if column is None else [column], use_threads=False)
    return (ipc.open_file if is_file else ipc.open_stream)(mapped, options=options)


def _check_column(path: Path, schema: pyarrow.Schema, field: TextField) -> int:
    """Index of the column of texts in the schema; `UserError` if there is none."""
    from pyarrow import types

    index = schema.get_field_index(field.name)
    if index < 0:
        raise UserError(f"{path}: {field.missing(schema.names)}")
    kind = schema.field(index).type
    values = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)):
        raise UserError(f"{path}: column {field.name!r} holds {kind}, not text; set {field.set_with} to one that does")
    return index


def _rows_at_once(metadata: pyarrow.parquet.FileMetaData, field: TextField) -> int:
    """Number of rows that hold about `_BATCH_BYTES` of text."""
    n_bytes = 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            if row_group.column(index).path_in_schema == field.name:
                n_bytes += row_group.column(index).total_uncompressed_size
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * metadata.num_rows // max(n_bytes, 1)))


def _rows(path: Path, column: pyarrow.Array, skip: int, progress: Progress) -> Iterator[Record]:
    """The records of a column, from number `skip` of the file on."""
    import pyarrow as pa

    first = min(max(skip - progress.records, 0), len(column))
    progress.records += first
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    step = max(1, min(_BATCH_ROWS, _BATCH_BYTES * len(column) // max(column.nbytes, 1)))
    for start in range(first, len(column), step):
        for value in _values(column.slice(start, step)):
            number = progress.records
            progress.records += 1
            yield number, value if isinstance(value, str) else _problem(value, f"{path}: record {number + 1}")


def _values(column: pyarrow.Array) -> list[str | bytes | None]:
    """Texts; bytes where they are not UTF-8, and None where there is none."""
    try:
        texts: list[str | bytes | None] = column.to_pylist()
        return texts
    except UnicodeDecodeError:
        return [_decoded(scalar.as_buffer().to_pybytes()) if scalar.is_valid else None for scalar in column]


def _decoded(content: bytes) -> str | bytes:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content


def _problem(value: bytes | None, where: str) -> Problem:
    if value is None:
        return Problem(where, "no text (null); fill it, or leave the row out")
    return Problem(where, "not UTF-8; convert the column")
