"""What is in a dataset folder, in numbers and samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from data.dataset import Dataset, TokenStream
from data.tokenizer import Tokenizer

_BINS = 32  # lengths have 31 bits


def length_histogram(stream: TokenStream) -> tuple[np.ndarray, np.ndarray]:
    """Documents and tokens by length: two int64 (32,), bin k is for 2**k to 2**(k + 1) - 1 tokens, the
    end-of-document token among them."""
    documents, tokens = np.zeros(_BINS, dtype=np.int64), np.zeros(_BINS, dtype=np.int64)
    for lengths in stream.lengths_by_shard():
        # frexp is exact: its exponent is the number of bits.
        bins = np.maximum(np.frexp(lengths.astype(np.float64))[1] - 1, 0)
        documents += np.bincount(bins, minlength=_BINS)
        tokens += np.bincount(bins, weights=lengths, minlength=_BINS).astype(np.int64)
    return documents, tokens


def summary(dataset: Dataset, split: str) -> dict[str, Any]:
    """Counts of a split, its bytes of text per token, and the bins of its histogram that are not empty."""
    listed = dataset.manifest["splits"][split]
    documents, tokens = length_histogram(dataset.train if split == "train" else dataset.eval)
    return {
        **{what: listed[what] for what in ("documents", "tokens", "bytes")},
        "shards": len(listed["shards"]),
        "bytes_per_token": listed["bytes"] / listed["tokens"] if listed["tokens"] else None,
        "lengths": [
            {"from": 1 << k, "to": (2 << k) - 1, "documents": int(documents[k]), "tokens": int(tokens[k])}
            for k in map(int, np.flatnonzero(documents))
        ],
    }


def samples(stream: TokenStream, tokenizer: Tokenizer, count: int, max_tokens: int) -> Iterator[dict[str, Any]]:
    """`count` documents spread evenly over a split: `document` (its number), `tokens`, and the `text` of its first
    `max_tokens` tokens."""
    count = min(count, stream.n_documents)
    for i in range(count):
        number = (2 * i + 1) * stream.n_documents // (2 * count)
        ids = stream.document(number)
        shown = ids[: min(max_tokens, len(ids) - 1)]  # without the end-of-document token
        yield {"document": number, "tokens": len(ids), "text": tokenizer.decode(shown)}
