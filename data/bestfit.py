"""Best-fit packing: which documents share a row, from their lengths alone.

No document is cut that fits into a row (Ding et al. 2024, arXiv:2404.10830). Windows of consecutive documents are
packed one by one, the largest document first, each into the fullest row that has room for it (best-fit decreasing). The
plan is made of the documents' lengths alone, the same wherever it is made, and holds four bytes a document and four a
row.

Shapes: M documents, T tokens in a row.
"""

from __future__ import annotations

import numpy as np

WINDOW = 65_536  # documents packed together: enough for few gaps, few enough that a row's documents lie near each other


class BestFit:
    """Rows for documents that start at `starts` (M + 1,), tokens of a stream, the last its end.

    A document of n tokens has n - 1 predictions. If these are more than T, it is cut into full rows and a rest, which
    is packed like a short document. Full rows come first, in the file's order, then packed rows, window by window. The
    documents of a row are in the file's order.

    `gap` is 1 if two documents of a row need a position between them, where the model is shown the first one's end.

    Attributes: `n_rows`; `padding`, positions of all rows that hold no token; `cut`, documents that are in several
    rows.
    """

    def __init__(self, starts: np.ndarray, seq_len: int, gap: int) -> None:
        n_documents = len(starts) - 1
        of_documents = np.uint32 if n_documents < 2**32 else np.int64
        none = np.empty(0, dtype=of_documents)
        long, full, packed, sizes = [none], [none], [none], [none]
        predicted = self.cut = 0
        for begin in range(0, n_documents, WINDOW):
            predictions = np.maximum(np.diff(starts[begin : begin + WINDOW + 1]) - 1, 0)
            rows, rests = np.divmod(predictions, seq_len)
            long.append((begin + np.flatnonzero(rows)).astype(of_documents))
            full.append(rows[rows > 0])
            chosen = np.flatnonzero(rests)
            row_of = pack(rests[chosen] + gap, seq_len + gap)
            packed.append((begin + chosen[np.argsort(row_of, kind="stable")]).astype(of_documents))
            sizes.append(np.bincount(row_of).astype(np.uint32))
            predicted += int(predictions.sum())
            self.cut += int((predictions > seq_len).sum())
        # The full rows of document long[i] are before[i] ... before[i + 1] - 1.
        self._long = np.concatenate(long)
        self._before = np.concatenate([[0], np.concatenate(full).astype(np.int64).cumsum()])
        # Packed row r holds documents packed[first[r] : first[r + 1]].
        self._packed = np.concatenate(packed)
        n_packed = sum(map(len, sizes))
        self._first = np.zeros(n_packed + 1, dtype=np.uint32 if len(self._packed) < 2**32 else np.int64)
        np.cumsum(np.concatenate(sizes), out=self._first[1:])
        self.n_full = int(self._before[-1])
        self.n_rows = self.n_full + n_packed
        self.padding = self.n_rows * seq_len - predicted - gap * (len(self._packed) - n_packed)

    def row(self, row: int) -> tuple[list[int], int | None]:
        """The documents of a row, and which full piece of its only one it holds, from 0; None: the rest of each."""
        if row < self.n_full:
            i = int(np.searchsorted(self._before, row, side="right")) - 1
            return [int(self._long[i])], row - int(self._before[i])
        first, end = self._first[row - self.n_full : row - self.n_full + 2]
        return self._packed[first:end].tolist(), None


def pack(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Bin of each item by best-fit decreasing: int64 like `sizes`, bins numbered from 0 without a gap.

    Sizes lie in [1, capacity]. Items of one size are placed together, which gives the bins that placing them one by one
    would give.
    """
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    bins_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the space that is left
    spaces = 0  # bit s is set where bins_with[s] is not empty
    n_bins = 0
    assigned: list[int] = []  # bins, by place in `order`
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            # The least space that is enough. A bin that takes an item is then the fullest, and takes all it can.
            if fitting := spaces >> size:
                space = size + (fitting & -fitting).bit_length() - 1
                each = space // size
                chosen = bins_with[space][: -(-count // each)]
                del bins_with[space][: len(chosen)]
                if not bins_with[space]:
                    spaces ^= 1 << space
            else:
                space, each = capacity, capacity // size
                chosen = list(range(n_bins, n_bins - (-count // each)))
                n_bins += len(chosen)
            taken = min(count, each * len(chosen))
            assigned += chosen if each == 1 else [b for b in chosen for _ in range(each)][:taken]
            full, rest = divmod(taken, each)
            for left, some in ((space - each * size, chosen[:full]), (space - rest * size, chosen[full:])):
                if some and left:
                    bins_with[left] += some
                    spaces |= 1 << left
            count -= taken
    bins = np.empty(len(sizes), dtype=np.int64)
    bins[order] = assigned
    return bins
