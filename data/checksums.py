"""Checksums of files by block, so that damage can be told to the block."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

BLOCK_BYTES = 64 << 20
_READ_BYTES = 1 << 20


class BlockHasher:
    """BLAKE2b-256 of each `BLOCK_BYTES` of what is given to `update`, piece by piece. The last block may be shorter."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._digest = hashlib.blake2b(digest_size=32)
        self._in_block = 0
        self.n_bytes = 0

    def update(self, content: bytes) -> None:
        """Take the next bytes of the file."""
        view = memoryview(content)
        self.n_bytes += len(view)
        while len(view):
            piece = view[: BLOCK_BYTES - self._in_block]
            self._digest.update(piece)
            self._in_block += len(piece)
            view = view[len(piece) :]
            if self._in_block == BLOCK_BYTES:
                self._done.append(self._digest.hexdigest())
                self._digest, self._in_block = hashlib.blake2b(digest_size=32), 0

    def entry(self) -> dict[str, Any]:
        """The file's entry in a manifest: `bytes`, and `blocks` with a hash of each."""
        last = [self._digest.hexdigest()] if self._in_block else []
        return {"bytes": self.n_bytes, "blocks": [*self._done, *last]}


def entry_of(path: Path) -> dict[str, Any]:
    """The entry of a file as it lies there: sizes in bytes, hashes in hexadecimal."""
    hasher = BlockHasher()
    with open(path, "rb") as file:
        while content := file.read(_READ_BYTES):
            hasher.update(content)
    return hasher.entry()
