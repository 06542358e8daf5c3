"""Rows of a token stream: how documents are laid into sequences of one length.

A row is filled with spans of the stream. A span [start, stop) is a run of input tokens; their targets are the tokens
one further. `concat` has spans that run on over the ends of documents, the other packings have not: there the first
token of a document is never a target, and every other token is one exactly once an epoch.

Shapes: N rows, T = data.seq_len tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.errors import UserError
from data.bestfit import BestFit
from data.config import PackingName

Span = tuple[int, int]


class Tokens(Protocol):
    """What rows are made of: a `TokenFile` or a `TokenStream`."""

    n_tokens: int
    n_documents: int

    @property
    def bin_path(self) -> object:
        """For messages."""

    @property
    def document_starts(self) -> np.ndarray:
        """int64 (documents + 1,)."""

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop)."""


@dataclass(frozen=True)
class Batch:
    """Rows to learn from. Position t of a row predicts `targets[:, t]` from `tokens[:, : t + 1]`."""

    tokens: np.ndarray  # int64 (N, T)
    targets: np.ndarray  # int64 (N, T)
    mask: np.ndarray  # bool (N, T): which targets count in the loss
    # int32 (N, T) with data.document_mask: the number of each token's document in its row, 0, 1, 2, ...; padding, which
    # comes last, has a number of its own. None: a row is one document to the model.
    documents: np.ndarray | None = None

    @classmethod
    def padding(cls, n: int, seq_len: int, eos_id: int, document_mask: bool = False) -> Batch:
        """Rows of nothing but padding: no target counts. Causal attention keeps right padding away from real tokens."""
        eos = np.full((n, seq_len), eos_id, dtype=np.int64)
        documents = np.zeros((n, seq_len), dtype=np.int32) if document_mask else None
        return cls(eos, eos.copy(), np.zeros((n, seq_len), dtype=bool), documents)


@dataclass(frozen=True)
class Fill:
    """What a packing makes of its documents."""

    padding: float  # share of all positions that hold no token
    cut: int  # documents that are spread over more than one row
    documents: int

    def __str__(self) -> str:
        return f"{self.padding:.2%} padding, {self.cut:,} of {self.documents:,} documents cut"


class Rows:
    """The rows of a token stream under one packing, in file order.

    `concat`: row i holds tokens i T ... i T + T of the stream, the last as a target only; up to T tokens at the end of
    the stream fill no row. `pad`: a document of L tokens gives its L - 1 predictions to ceil((L - 1) / T) rows.
    `best_fit`: rows hold several documents, none of them cut that fits in one (data/bestfit.py).

    With `document_mask` batches say which document a token is of, and `concat` masks the targets that are the first of
    their document out of the loss. Without it, two documents in a row of `best_fit` have a position between them, the
    end-of-document token of the first as an input, with no target: the model is to see where a document ends.
    """

    def __init__(
        self, tokens: Tokens, seq_len: int, packing: PackingName, eos_id: int, document_mask: bool = False
    ) -> None:
        self._tokens, self._seq_len, self._packing, self._eos_id = tokens, seq_len, packing, eos_id
        self._document_mask = document_mask
        if packing == "concat":
            self._n_rows = max(tokens.n_tokens - 1, 0) // seq_len
        elif packing == "pad":
            # (documents + 1,) row at which each document starts, and the end.
            self._first_row = np.concatenate([[0], np.cumsum(-(-self._predictions() // seq_len))])
            self._n_rows = int(self._first_row[-1])
        else:
            self._plan = BestFit(tokens.document_starts, seq_len, gap=0 if document_mask else 1)
            self._n_rows = self._plan.n_rows
        if self._n_rows == 0:
            raise UserError(
                f"data.seq_len: a row of {seq_len} tokens and its last target is longer than the {tokens.n_tokens} "
                f"tokens of {tokens.bin_path}; lower data.seq_len or give more text (for the held-out part: raise "
                "data.eval_fraction, or --eval-fraction of gramian tokenize)"
            )

    def __len__(self) -> int:
        return self._n_rows

    def take(self, indices: np.ndarray) -> Batch:
        """The rows at `indices` (N,), in that order. Raises `IndexError` for one outside [0, len)."""
        batch = Batch.padding(len(indices), self._seq_len, self._eos_id, self._document_mask)
        self.put(indices, batch, np.arange(len(indices)))
        return batch

    def put(self, indices: np.ndarray, batch: Batch, places: np.ndarray) -> None:
        """Write the rows at `indices` over the rows at `places` of a batch, which must be padding there."""
        for row, place in zip(indices.tolist(), places.tolist(), strict=True):
            if not 0 <= row < self._n_rows:
                raise IndexError(f"row {row} of {self._n_rows}")
            at = 0
            spans = self._spans(row)
            for number, (start, stop) in enumerate(spans):
                window, end = self._tokens.slice(start, stop + 1), at + stop - start
                batch.tokens[place, at:end] = window[:-1]
                batch.targets[place, at:end] = window[1:]
                batch.mask[place, at:end] = True
                if batch.documents is not None:
                    batch.documents[place, at:] = number
                elif end < self._seq_len and number + 1 < len(spans):
                    batch.tokens[place, end] = window[-1]
                    end += 1
                at = end
            if batch.documents is not None:
                if self._packing == "concat":
                    self._mark_documents(spans[0], batch.mask[place], batch.documents[place])
                else:
                    batch.documents[place, at:] = len(spans)

    def fill(self) -> Fill:
        """What the packing makes of the documents. Reads the index of the stream."""
        n_documents, starts = self._tokens.n_documents, self._tokens.document_starts
        if self._packing == "best_fit":
            padding, cut = self._plan.padding, self._plan.cut
        elif self._packing == "pad":
            predictions = self._predictions()
            padding = self._n_rows * self._seq_len - int(predictions.sum())
            cut = int((predictions > self._seq_len).sum())
        else:
            # The inputs of a document's own predictions are its tokens but the last.
            first, last = starts[:-1], starts[1:] - 2
            padding, cut = 0, int(((last >= first) & (first // self._seq_len != last // self._seq_len)).sum())
        return Fill(padding / (self._n_rows * self._seq_len), cut, n_documents)

    def _predictions(self) -> np.ndarray:
        """int64 (documents,): targets that each document has of its own."""
        return np.maximum(np.diff(self._tokens.document_starts) - 1, 0)

    def _spans(self, row: int) -> list[Span]:
        """The spans of a row, in its order."""
        seq_len = self._seq_len
        if self._packing == "concat":
            return [(row * seq_len, (row + 1) * seq_len)]
        starts = self._tokens.document_starts
        if self._packing == "pad":
            document = int(np.searchsorted(self._first_row, row, side="right")) - 1
            start = int(starts[document]) + (row - int(self._first_row[document])) * seq_len
            return [(start, min(start + seq_len, int(starts[document + 1]) - 1))]
        documents, piece = self._plan.row(row)
        if piece is not None:
            start = int(starts[documents[0]]) + piece * seq_len
            return [(start, start + seq_len)]
        lasts = [int(starts[document + 1]) - 1 for document in documents]
        return [(last - (last - int(starts[d])) % seq_len, last) for d, last in zip(documents, lasts, strict=True)]

    def _mark_documents(self, span: Span, mask: np.ndarray, documents: np.ndarray) -> None:
        """Number the documents of a row of `concat`, and take targets that start one out of its loss mask."""
        starts = self._tokens.document_starts
        first, end = np.searchsorted(starts, span, side="right")
        # Documents that start after the row's first input, up to its last target. Empty ones share their start.
        begins = np.unique(starts[first:end] - span[0])
        mask[begins - 1] = False
        documents[:] = 0
        documents[begins[begins < len(documents)]] = 1
        np.cumsum(documents, out=documents)
