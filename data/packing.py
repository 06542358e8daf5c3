"""Rows of a token file: how documents are cut into sequences of one length.

Shapes: N rows, T = data.seq_len tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.errors import UserError
from data.shards import TokenFile


@dataclass(frozen=True)
class Batch:
    """Rows to learn from. Position t of a row predicts `targets[:, t]` from `tokens[:, : t + 1]`."""

    tokens: np.ndarray  # int64 (N, T)
    targets: np.ndarray  # int64 (N, T)
    mask: np.ndarray  # bool (N, T): which targets count in the loss

    @classmethod
    def padding(cls, n: int, seq_len: int, eos_id: int) -> Batch:
        """Rows of nothing but padding: no target counts. Causal attention keeps right padding away from real tokens."""
        eos = np.full((n, seq_len), eos_id, dtype=np.int64)
        return cls(eos, eos.copy(), np.zeros((n, seq_len), dtype=bool))

    def followed_by(self, other: Batch) -> Batch:
        """The rows of both, those of `other` last."""
        pairs = ((self.tokens, other.tokens), (self.targets, other.targets), (self.mask, other.mask))
        return Batch(*(np.concatenate(pair) for pair in pairs))


class Rows:
    """The rows of a token file under one packing, in file order.

    `concat`: row i holds tokens i T ... i T + T of the stream, the last as a target only; up to T tokens at the end of
    the file fill no row. `pad`: a document of L tokens gives its L - 1 predictions to ceil((L - 1) / T) rows.
    """

    def __init__(self, tokens: TokenFile, seq_len: int, packing: Literal["concat", "pad"], eos_id: int) -> None:
        self._tokens, self._seq_len, self._packing, self._eos_id = tokens, seq_len, packing, eos_id
        if packing == "concat":
            self._n_rows = max(tokens.n_tokens - 1, 0) // seq_len
        else:
            # (documents + 1,) row at which each document starts, and the end.
            predictions = np.maximum(np.diff(tokens.document_starts) - 1, 0)
            self._first_row = np.concatenate([[0], np.cumsum(-(-predictions // seq_len))])
            self._n_rows = int(self._first_row[-1])
        if self._n_rows == 0:
            raise UserError(
                f"data.seq_len: a row of {seq_len} tokens and its last target is longer than the {tokens.n_tokens} "
                f"tokens of {tokens.bin_path}; lower data.seq_len or give more text (for the held-out part: raise "
                "data.eval_fraction)"
            )

    def __len__(self) -> int:
        return self._n_rows

    def take(self, indices: np.ndarray) -> Batch:
        """The rows at `indices` (N,), in that order. Raises `IndexError` for one outside [0, len)."""
        batch = Batch.padding(len(indices), self._seq_len, self._eos_id)
        for n, row in enumerate(indices):
            start, stop = self._span(int(row))
            window = self._tokens.slice(start, stop + 1)
            batch.tokens[n, : stop - start] = window[:-1]
            batch.targets[n, : stop - start] = window[1:]
            batch.mask[n, : stop - start] = True
        return batch

    def _span(self, row: int) -> tuple[int, int]:
        """Places [start, stop) in the stream of the row's input tokens; the targets are one further."""
        if not 0 <= row < self._n_rows:
            raise IndexError(f"row {row} of {self._n_rows}")
        if self._packing == "concat":
            return row * self._seq_len, (row + 1) * self._seq_len
        document = int(np.searchsorted(self._first_row, row, side="right")) - 1
        first, end = (int(start) for start in self._tokens.document_starts[document : document + 2])
        start = first + (row - int(self._first_row[document])) * self._seq_len
        return start, min(start + self._seq_len, end - 1)
