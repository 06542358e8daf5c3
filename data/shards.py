"""Token files in Megatron's indexed format, so that peers read ours and we read theirs.

`NAME.bin` holds token ids and nothing else. `NAME.idx` holds, little-endian:

| bytes | content |
| --- | --- |
| 9 | magic `MMIDIDX\\0\\0` |
| 8 | uint64 version, 1 |
| 1 | uint8 code of the token type, see `_CODES` |
| 8 | uint64 number of sequences S |
| 8 | uint64 length of the document index D: documents + 1 |
| 4 S | int32 tokens in each sequence |
| 8 S | int64 byte at which each sequence starts in the .bin |
| 8 D | int64 first sequence of each document, and S |

We write one sequence a document: its tokens and an end-of-document token.
"""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from common.errors import UserError
from common.files import naming, sync_directory
from data.checksums import BlockHasher

PARTIAL = ".partial"  # ends the names of files that are being written

_LONGEST = 2**31 - 1  # tokens of a document: the index has 32 bits for them
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def dtype_for(n_ids: int) -> str:
    """Type for ids 0 ... n_ids - 1, as Megatron chooses it: the cut is at 65,500, not at 65,536."""
    return "uint16" if n_ids < 65_500 else "int32"


class TokenWriter:
    """Writes `prefix`.bin and `prefix`.idx. They get these names at the end of a `with` block that does not raise, or
    when `close` is called.

    Attributes: `n_documents` and `n_tokens` so far; after closing, `files`, the manifest entry of each by its name.
    """

    def __init__(self, prefix: Path, dtype: str) -> None:
        self._bin, self._idx = _paths(prefix)
        self._partial_bin, self._partial_idx = (p.with_name(p.name + PARTIAL) for p in (self._bin, self._idx))
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._lengths = array("i")
        self.n_tokens = 0
        self.files: dict[str, dict[str, Any]] = {}
        self._begin(self._partial_bin)

    @property
    def n_documents(self) -> int:
        """Documents written so far."""
        return len(self._lengths)

    def append(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Write one document. Raises `ValueError` for an id that the file's type cannot hold."""
        ids = np.asarray(tokens, dtype=np.int64)
        self.extend(ids, np.array([ids.size]))

    def extend(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Write documents: their tokens one after the other (any integer type), and the number of tokens of each.

        Raises `ValueError` for an id that the file's type cannot hold, or a document of 2**31 tokens.
        """
        if lengths.sum(dtype=np.int64) != tokens.size or (lengths.size and lengths.max() > _LONGEST):
            raise ValueError(f"lengths up to {lengths.max()} for {tokens.size} tokens of {self._bin}")
        if tokens.dtype != self._dtype:
            limits = np.iinfo(self._dtype)
            if tokens.size and (tokens.min() < 0 or tokens.max() > limits.max):
                raise ValueError(
                    f"token ids {tokens.min()} ... {tokens.max()} do not fit {self._dtype.name} of {self._bin}"
                )
            tokens = tokens.astype(self._dtype)
        self._write(tokens.tobytes())
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.n_tokens += tokens.size

    def close(self) -> None:
        """Write the index, make both files durable, and give them their names."""
        entries = {self._bin.name: self._sync_and_close()}
        lengths = np.frombuffer(self._lengths, dtype=np.int32).astype("<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        code = next(code for code, name in _CODES.items() if np.dtype(name) == self._dtype)
        self._begin(self._partial_idx)
        self._write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1))
        for part in (
            lengths,
            ends - lengths.astype("<i8") * self._dtype.itemsize,
            np.arange(len(lengths) + 1, dtype="<i8"),
        ):
            self._write(part.tobytes())
        entries[self._idx.name] = self._sync_and_close()
        # The index comes last: a pair whose index is there is whole.
        os.replace(self._partial_bin, self._bin)
        os.replace(self._partial_idx, self._idx)
        sync_directory(self._idx.parent)
        self.files = entries

    def discard(self) -> None:
        """Give up, and leave nothing behind."""
        with contextlib.suppress(OSError):  # what is still to be flushed may find a full disk
            self._file.close()
        for path in (self._partial_bin, self._partial_idx):
            path.unlink(missing_ok=True)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        else:
            self.close()

    def _begin(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `close` or `discard`)
        self._hasher = BlockHasher()

    def _write(self, content: bytes) -> None:
        with naming(Path(self._file.name)):
            self._file.write(content)
        self._hasher.update(content)

    def _sync_and_close(self) -> dict[str, Any]:
        with naming(Path(self._file.name)):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._hasher.entry()


def read_header(idx_path: Path) -> tuple[np.dtype, int, int]:
    """Type of a token, number of sequences and of documents, as the head of an index says.

    Raises `UserError` that names the file if it is missing or not of this format.
    """
    try:
        with open(idx_path, "rb") as file:
            header = file.read(_HEADER.size)
    except OSError as error:
        raise UserError(
            f"{idx_path}: cannot be read: {error.strerror}; a .bin and its .idx must lie side by side"
        ) from None
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise UserError(f"{idx_path}: not a Megatron index (it does not begin with MMIDIDX); make it again")
    _, version, code, n_sequences, n_index = _HEADER.unpack(header)
    if version != _VERSION:
        raise UserError(f"{idx_path}: index version {version}; only version {_VERSION} can be read")
    if code not in _CODES or np.dtype(_CODES[code]).kind == "f":
        raise UserError(f"{idx_path}: type code {code} is no integer type; token ids must be integers")
    if n_index < 1:
        raise UserError(f"{idx_path}: its document index is empty; make it again")
    return np.dtype(_CODES[code]), n_sequences, n_index - 1


class TokenFile:
    """A memory-mapped pair `prefix`.bin, `prefix`.idx, read as one stream of tokens or document by document.

    Attributes: `dtype` of a token, `lengths` int32 (sequences,), `n_tokens`, `n_documents`. Raises `UserError` that
    names the file if the pair is missing, cut short, or not of this format.
    """

    def __init__(self, prefix: Path) -> None:
        self.bin_path, self.idx_path = _paths(prefix)
        for path in (self.bin_path, self.idx_path):
            if not path.is_file():
                raise UserError(f"{path}: no such token file; a .bin and its .idx must lie side by side")
        self.dtype, n_sequences, self.n_documents = read_header(self.idx_path)
        n_index = self.n_documents + 1
        _check_size(self.idx_path, _HEADER.size + 12 * n_sequences + 8 * n_index)
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        bounds = np.cumsum([_HEADER.size, 4 * n_sequences, 8 * n_sequences, 8 * n_index])
        self.lengths = index[bounds[0] : bounds[1]].view("<i4")
        pointers = index[bounds[1] : bounds[2]].view("<i8")
        documents = index[bounds[2] : bounds[3]].view("<i8")
        self.n_tokens = int(self.lengths.sum(dtype=np.int64))
        _check_size(self.bin_path, self.n_tokens * self.dtype.itemsize)
        # (documents + 1,) token at which each document starts, and the end. Sequences follow one another without a gap.
        starts = np.append(pointers // self.dtype.itemsize, self.n_tokens)
        if not np.array_equal(np.diff(starts), self.lengths) or starts[0] != 0 or not _ascends(documents, n_sequences):
            raise UserError(f"{self.idx_path}: its lengths, pointers and document index do not agree; make it again")
        self.document_starts: np.ndarray = starts[documents]
        self._tokens = (
            np.memmap(self.bin_path, dtype=self.dtype, mode="r") if self.n_tokens else np.empty(0, dtype=self.dtype)
        )

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream of all documents: (stop - start,) of `dtype`, a view of the file."""
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.n_tokens} in {self.bin_path}")
        return self._tokens[start:stop]

    def document(self, i: int) -> np.ndarray:
        """Tokens of document i, a view of the file."""
        if not 0 <= i < self.n_documents:
            raise IndexError(f"document {i} of {self.n_documents} in {self.bin_path}")
        return self.slice(int(self.document_starts[i]), int(self.document_starts[i + 1]))


def _paths(prefix: Path) -> tuple[Path, Path]:
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def _check_size(path: Path, expected: int) -> None:
    if (size := path.stat().st_size) != expected:
        raise UserError(f"{path}: {size} bytes where the index says {expected}; it is damaged, make it again")


def _ascends(documents: np.ndarray, n_sequences: int) -> bool:
    return bool(documents[0] == 0 and documents[-1] == n_sequences and (np.diff(documents) >= 0).all())
