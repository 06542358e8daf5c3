"""Of which matrices a parameter consists, and which rank owns each. Pure functions: every rank comes to the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optim.boxes import Box


@dataclass(frozen=True)
class Matrix:
    """A logical matrix (rule 6): an expert's, one of the parts of a fused parameter, a head's where they are apart."""

    parameter: str
    index: int | None  # its number among several of the parameter
    box: Box  # where it lies in the parameter

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        m, n = self.box.shape[-2:]
        return m, n

    def state_name(self, state: str) -> str:
        """Name in checkpoints of one of its state tensors."""
        return f"{self.parameter}.{state}" + ("" if self.index is None else f".{self.index}")


def matrices_of(name: str, shape: Sequence[int], role: Mapping[str, Any], split_heads: bool) -> list[Matrix]:
    """The matrices of a parameter of shape (rows, columns) or (experts, rows, columns).

    Args:
        role: what the model declares; `parts`: rows of each matrix that is fused along the rows, or how many of equal
            rows there are; `heads`: into how many of equal rows each part is split, if `split_heads`.

    Raises:
        ValueError: a shape that is no matrix, or one that its parts or heads do not divide.
    """
    if len(shape) not in (2, 3):
        raise ValueError(f"parameter '{name}' of shape {tuple(shape)} is no matrix")
    rows = shape[-2]
    parts, heads = role.get("parts", 1), role.get("heads", 1) if split_heads else 1
    of_parts = [rows // parts] * parts if isinstance(parts, int) else list(parts)
    of_heads = [heads] * len(of_parts) if isinstance(heads, int) else list(heads)
    if sum(of_parts) != rows or len(of_heads) != len(of_parts) or any(map(int.__mod__, of_parts, of_heads)):
        raise ValueError(f"parameter '{name}' of {rows} rows has parts {parts} and heads {heads}")
    lengths = [part // count for part, count in zip(of_parts, of_heads, strict=True) for _ in range(count)]
    boxes = []
    for expert in range(shape[0]) if len(shape) == 3 else [None]:
        start = 0
        for length in lengths:
            lead, past = ((expert,), (expert + 1,)) if expert is not None else ((), ())
            boxes.append(Box((*lead, start, 0), (*past, start + length, shape[-1])))
            start += length
    return [Matrix(name, None if len(boxes) == 1 else i, box) for i, box in enumerate(boxes)]


def choose_owners(
    matrices: Sequence[Matrix],
    held: Mapping[str, Sequence[Sequence[Box]]],
    cost: Callable[[int, int], float],
    ranks: int,
) -> list[int]:
    """The rank that updates each matrix.

    Ranks that hold a matrix whole come first, so that it need not travel. Among those that are left, the costliest
    matrix goes to the rank with the least to do, then the next one (longest processing time first, Graham 1969).
    """
    work, owners = [0.0] * ranks, [0] * len(matrices)
    costs = [cost(*matrix.shape) for matrix in matrices]
    at_home = [
        [rank for rank, boxes in enumerate(held[matrix.parameter]) if matrix.box in map(matrix.box.meet, boxes)]
        for matrix in matrices
    ]
    order = sorted(range(len(matrices)), key=lambda i: (len(at_home[i]) or ranks, -costs[i], i))
    for i in order:
        owners[i] = min(at_home[i] or range(ranks), key=lambda rank: (work[rank], rank))
        work[owners[i]] += costs[i]
    return owners
