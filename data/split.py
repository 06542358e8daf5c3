"""Which documents are held out for evaluation.

A document is held out when a hash of its content falls under a threshold. So the choice does not depend on the order or
the number of the other documents, and a document that occurs twice never lies on both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.errors import UserError

_HASHES = 1 << 64


@dataclass(frozen=True)
class Split:
    """The rule for one corpus: either a threshold on hashes, or (a single distinct document) a cut through it."""

    threshold: int
    cut_fraction: float | None
    n_bytes: int  # UTF-8 bytes of all documents, where they were read

    @classmethod
    def plan(cls, documents: Iterable[str], fraction: float) -> Split:
        """Read all documents once. Each side gets at least one of two or more distinct documents."""
        hashes: set[int] = set()
        n_bytes = n_chars = 0
        for text in documents:
            content = text.encode("utf-8")
            hashes.add(_hash(content))
            n_bytes, n_chars = n_bytes + len(content), len(text)
        if len(hashes) == 1:
            if n_chars < 2:
                raise UserError("data.corpus: one character is too little to train and to evaluate on; give more text")
            return cls(0, fraction, n_bytes)
        # Small corpora: move the threshold above the smallest hash, or down to the largest, so that no side is empty.
        threshold = min(max(int(fraction * _HASHES), min(hashes) + 1), max(hashes))
        return cls(threshold, None, n_bytes)

    @classmethod
    def at(cls, fraction: float) -> Split:
        """Hold out this share of the documents, as a hash of each has it; of few it may be none. Reads nothing."""
        return cls(int(fraction * _HASHES), None, 0)

    def apply(self, documents: Iterable[str]) -> Iterator[tuple[bool, str]]:
        """Yield (held out, text) in order; a cut document yields its head, then its held-out end."""
        for text in documents:
            if self.cut_fraction is None:
                yield _hash(text.encode("utf-8")) < self.threshold, text
            else:
                cut = len(text) - max(1, round(len(text) * self.cut_fraction))
                yield False, text[:cut]
                yield True, text[cut:]


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
