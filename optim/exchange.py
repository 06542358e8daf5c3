"""How parts of gradients come to the owners of matrices, and their updates back: two uneven all-to-alls a bucket.

A rank has its part of every gradient and needs its part of every update; an owner needs its matrices whole. What goes
where is known from boxes alone, so ranks agree on it without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from optim.boxes import Box, Ranks
from optim.ownership import Matrix

# Numbers that travel together. While an owner works on those of a bucket, those of the next one are on their way.
BUCKET_SIZE = 1 << 24

Index = tuple[slice, ...]


class Piece:
    """A part of a matrix that one rank holds: the matrix' number in its bucket, and where the part is in a tensor.

    That is the whole matrix, or, of what a rank holds of a parameter, the box of a number.
    """

    def __init__(self, matrix: int, at: Index, box: int = 0) -> None:
        self.matrix, self.at, self.box = matrix, at, box
        self.shape = tuple(side.stop - side.start for side in at)


class Returned(NamedTuple):
    """An update that came back: of which parameter, in which of this rank's boxes of it, where there."""

    parameter: str
    box: int
    at: Index
    values: Tensor


class Message(NamedTuple):
    """What a rank sends to all others, or gets from them, in their order; and what it keeps, which does not travel."""

    pieces: list[Piece]
    sizes: list[int]  # numbers for, or of, each rank
    kept: list[Piece]

    @staticmethod
    def of(by_rank: Sequence[Sequence[Piece]], mine: int) -> Message:
        """From the pieces for, or of, each rank, of which this one is `mine`."""
        others = [[] if rank == mine else those for rank, those in enumerate(by_rank)]
        pieces = [piece for those in others for piece in those]
        return Message(
            pieces, [sum(math.prod(piece.shape) for piece in those) for those in others], list(by_rank[mine])
        )


class Bucket:
    """Matrices that travel together."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        owners: Sequence[int],
        held: Mapping[str, Sequence[Sequence[Box]]],
        ranks: Ranks,
    ):
        """`owners` by matrix; `held`: the boxes of every rank, by parameter."""
        self.matrices, self._ranks = list(matrices), ranks
        self.mine = [i for i, owner in enumerate(owners) if owner == ranks.mine]
        given, taken, returned, home = ([[] for _ in range(ranks.size)] for _ in range(4))  # type: ignore[var-annotated]
        for i, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
            here = held[matrix.parameter][ranks.mine]
            for part, holders in _parts(matrix, held[matrix.parameter]).items():
                in_matrix = Piece(i, part.within(matrix.box)[-2:])
                # Of copies the nearest one is sent: replicas may be far from one another.
                giver = min(holders, key=lambda rank: (abs(rank - owner), rank))
                if ranks.mine in holders:
                    box = holders[ranks.mine]
                    at_home = Piece(i, part.within(here[box]), box)
                    home[owner].append(at_home)
                    if giver == ranks.mine:
                        given[owner].append(at_home)
                if owner == ranks.mine:
                    taken[giver].append(in_matrix)
                    for holder in holders:
                        returned[holder].append(in_matrix)
        self._given, self._taken, self._returned, self._home = (
            Message.of(by_rank, ranks.mine) for by_rank in (given, taken, returned, home)
        )

    def gather(
        self, gradients: Mapping[str, Sequence[Tensor]], device: torch.device, share: bool = False
    ) -> Callable[[], dict[int, Tensor]]:
        """Start this rank's parts of gradients, box by box, on their way to owners.

        What it returns waits for this rank's matrices, and gives them whole by their number in the bucket, in fp32;
        with `share` they may be views of `gradients`, where those are whole already.
        """

        def part(piece: Piece) -> Tensor:
            return gradients[self.matrices[piece.matrix].parameter][piece.box][piece.at]

        arrive = self._exchange([part(piece) for piece in self._given.pieces], self._given, self._taken, device)
        kept = [
            (to, part(piece).reshape(to.shape)) for piece, to in zip(self._given.kept, self._taken.kept, strict=True)
        ]

        def finish() -> dict[int, Tensor]:
            wholes: dict[int, Tensor] = {}
            for piece, values in (*kept, *arrive()):
                shape = self.matrices[piece.matrix].shape
                if share and values.shape == shape:
                    wholes[piece.matrix] = values.float()
                    continue
                if piece.matrix not in wholes:
                    wholes[piece.matrix] = torch.empty(shape, device=device)
                wholes[piece.matrix][piece.at] = values
            return wholes

        return finish

    def scatter(self, updates: Mapping[int, Tensor], device: torch.device) -> Callable[[], list[Returned]]:
        """Start the updates of this rank's matrices on their way to all that hold a part of them.

        What it returns waits for this rank's parts, whose values may share memory with `updates`.
        """
        sent = [updates[piece.matrix][piece.at] for piece in self._returned.pieces]
        arrive = self._exchange(sent, self._returned, self._home, device)
        kept = [
            (home, updates[piece.matrix][piece.at].reshape(home.shape).float())
            for piece, home in zip(self._returned.kept, self._home.kept, strict=True)
        ]
        return lambda: [
            Returned(self.matrices[piece.matrix].parameter, piece.box, piece.at, values)
            for piece, values in (*kept, *arrive())
        ]

    def _exchange(
        self, parts: Sequence[Tensor], out: Message, into: Message, device: torch.device
    ) -> Callable[[], list[tuple[Piece, Tensor]]]:
        if self._ranks.group is None:
            return list
        sent = torch.cat([part.reshape(-1).float() for part in parts] or [torch.empty(0, device=device)])
        received = torch.empty(sum(into.sizes), device=device)
        work = dist.all_to_all_single(received, sent, into.sizes, out.sizes, self._ranks.group, async_op=True)

        def arrive() -> list[tuple[Piece, Tensor]]:
            nonlocal sent
            work.wait()
            del sent  # which had to live until here
            flat = received.split([math.prod(piece.shape) for piece in into.pieces])
            return [(piece, part.view(piece.shape)) for piece, part in zip(into.pieces, flat, strict=True)]

        return arrive


def buckets(
    matrices: Sequence[Matrix],
    owners: Sequence[int],
    held: Mapping[str, Sequence[Sequence[Box]]],
    ranks: Ranks,
    size: int = BUCKET_SIZE,
) -> list[Bucket]:
    """Matrices in their order, in as few buckets as have about so many numbers each."""
    return [
        Bucket([matrices[i] for i in those], [owners[i] for i in those], held, ranks)
        for those in _cut([matrix.box.numel for matrix in matrices], size)
    ]


def _cut(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Numbers of things in runs, each of which is the shortest that reaches `limit`, or the last."""
    runs: list[list[int]] = [[]]
    total = 0
    for i, size in enumerate(sizes):
        if total >= limit:
            runs.append([])
            total = 0
        runs[-1].append(i)
        total += size
    return [run for run in runs if run]


def _parts(matrix: Matrix, held: Sequence[Sequence[Box]]) -> dict[Box, dict[int, int]]:
    """The parts that ranks hold of a matrix, each with the ranks that do and the number of their box it is in."""
    parts: dict[Box, dict[int, int]] = {}
    for rank, boxes in enumerate(held):
        for number, box in enumerate(boxes):
            part = box.meet(matrix.box)
            if part.numel:
                parts.setdefault(part, {})[rank] = number
    return parts
