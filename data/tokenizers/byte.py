"""Bytes as tokens."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.files import atomic_write

FILE_NAME = "tokenizer.bytes.json"
CONTENT = b'{"kind": "bytes", "eos_id": 256}\n'
N_BYTES = 256


class ByteTokenizer:
    """Ids 0 ... 255 are the bytes of the text's UTF-8, 256 ends a document."""

    kind = "bytes"
    vocab_size = N_BYTES + 1
    max_id = N_BYTES
    eos_id = N_BYTES
    exact = True
    hash = hashlib.blake2b(CONTENT, digest_size=32).hexdigest()

    @property
    def special_tokens(self) -> dict[str, int]:
        return {"</s>": self.eos_id}

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        return np.array([1] * N_BYTES + [0], dtype=np.int64)

    def encode(self, texts: Sequence[str], threads: int | None = None) -> list[list[int]]:
        """Ids of each text; `threads` changes nothing."""
        return [list(text.encode("utf-8")) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of a row of ids. Raises `IndexError` for an id outside the vocabulary."""
        row = np.asarray(ids, dtype=np.int64)
        if row.size and (row.min() < 0 or row.max() > self.max_id):
            raise IndexError(f"ids {row.min()} ... {row.max()} of {self.vocab_size}")
        return row[row < N_BYTES].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, folder: Path) -> str:
        atomic_write(folder / FILE_NAME, CONTENT)
        return FILE_NAME
