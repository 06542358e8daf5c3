"""Matrices and their owners: each matrix has one, which alone keeps its state and computes its update.

A round is: parts of gradients travel to owners; owners apply the rule; parts of updates travel back. So nothing is
computed twice, and a rank's memory and work are its share of the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optim.boxes import Box, Ranks
from optim.exchange import BUCKET_SIZE, Bucket, Returned, buckets
from optim.ownership import Matrix, choose_owners
from optim.rule import MAX_FAILURES, Rule


@dataclass
class Batch:
    """This rank's matrices of one shape in one bucket."""

    matrices: list[Matrix]
    numbers: list[int]  # in the bucket
    state: dict[str, Tensor]  # [B, ...], fp32
    steps: Tensor  # (B,) int64, on the host: updates so far


class Owners:
    """A rule's state and work, spread over ranks. Decay is decoupled: `W <- (1 - lr decay) W - lr U`."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        held: Mapping[str, Sequence[Sequence[Box]]],
        ranks: Ranks,
        rule: Rule,
        device: torch.device,
        bucket_size: int = BUCKET_SIZE,
    ):
        """`held`: the boxes of every rank, by parameter. All ranks make theirs at once."""
        self.rule, self.ranks, self.device = rule, ranks, device
        self.matrices = list(matrices)
        self.owners = choose_owners(self.matrices, held, rule.cost, ranks.size)
        self.can_fail = any("failures" in rule.state(*matrix.shape) for matrix in self.matrices)
        """Whether the rule counts eigendecompositions that failed; the same on all ranks."""
        self._buckets = buckets(self.matrices, self.owners, held, ranks, bucket_size)
        self._batches = [self._make_batches(bucket) for bucket in self._buckets]

    def _make_batches(self, bucket: Bucket) -> list[Batch]:
        numbers: dict[tuple[int, int], list[int]] = {}
        for i in bucket.mine:
            numbers.setdefault(bucket.matrices[i].shape, []).append(i)
        return [
            Batch(
                [bucket.matrices[i] for i in those],
                those,
                {
                    name: torch.zeros(len(those), *size, dtype=torch.float32, device=self.device)
                    for name, size in self.rule.state(*shape).items()
                },
                torch.zeros(len(those), dtype=torch.int64),
            )
            for shape, those in numbers.items()
        ]

    def failures(self) -> int:
        """How often in a row eigendecompositions have failed of the matrix where they did most, on this rank."""
        failures = [batch.state["failures"].max() for batch in self._owned() if "failures" in batch.state]
        return int(torch.stack(failures).max()) if failures else 0

    @torch.no_grad()
    def update(
        self,
        gradients: Mapping[str, Sequence[Tensor]],
        weights: Mapping[str, Sequence[Tensor]],
        groups: Mapping[str, Mapping[str, Any]],
        present: Collection[str],
    ) -> None:
        """Move the weights of parameters that are `present`; all ranks call it at once.

        Args:
            gradients: this rank's boxes, by parameter.
            weights: likewise; changed in place.
            groups: of each parameter a group, with its `lr` and `weight_decay`.
            present: names of parameters that have a gradient, the same on all ranks.
        """
        used = [k for k, bucket in enumerate(self._buckets) if any(m.parameter in present for m in bucket.matrices)]
        arriving: list[Callable[[], dict[int, Tensor]]] = []
        returning: list[Callable[[], list[Returned]]] = []
        for k, following in itertools.pairwise([None, *used, None]):
            # While this rank works on a bucket's matrices, the next bucket arrives and the last one returns.
            wholes = arriving.pop()() if arriving else {}
            if following is not None:
                arriving.append(self._buckets[following].gather(gradients, self.device, share=True))
            if k is not None:
                updates = self._apply_rule(self._batches[k], wholes, present)
                if returning:
                    _change(weights, returning.pop()(), groups, present)
                returning.append(self._buckets[k].scatter(updates, self.device))
        if returning:
            _change(weights, returning.pop()(), groups, present)

    def _apply_rule(
        self, batches: list[Batch], wholes: dict[int, Tensor], present: Collection[str]
    ) -> dict[int, Tensor]:
        """The updates of this rank's matrices by number; zeros for those without a gradient, whose state rests."""
        updates: dict[int, Tensor] = {}
        for batch in batches:
            by_step: dict[int, list[int]] = {}
            for row, (matrix, done) in enumerate(zip(batch.matrices, batch.steps.tolist(), strict=True)):
                if matrix.parameter in present:
                    by_step.setdefault(done + 1, []).append(row)
            for step, rows in by_step.items():
                everything = len(rows) == len(batch.matrices)
                state = batch.state if everything else {name: t[rows] for name, t in batch.state.items()}
                gradients_BMN = torch.stack([wholes[batch.numbers[row]] for row in rows])
                updates_BMN = self.rule.update(gradients_BMN, state, step)
                if everything:
                    batch.steps.fill_(step)
                else:
                    batch.steps[rows] = step
                    for name, tensor in batch.state.items():
                        tensor[rows] = state[name]
                updates |= {batch.numbers[row]: update for row, update in zip(rows, updates_BMN, strict=True)}
        return updates | {i: torch.zeros_like(whole) for i, whole in wholes.items() if i not in updates}

    def _owned(self) -> Iterator[Batch]:
        for batches in self._batches:
            yield from batches

    def named_state(self) -> dict[str, Tensor]:
        """State by name of parameter, state and, of several matrices, number: `blocks.0.attention.wq.weight.momentum`.

        Each rank has that of matrices that it owns. All are views of what is live.
        """
        result: dict[str, Tensor] = {}
        for batch in self._owned():
            for row, matrix in enumerate(batch.matrices):
                for name, tensor in (*batch.state.items(), ("step", batch.steps)):
                    result[matrix.state_name(name)] = tensor[row] if tensor.ndim > 1 else tensor[row : row + 1]
        return result


def refuse_failures(most: int) -> None:
    """Raise if eigendecompositions of a matrix failed too often in a row; `most` is the same on all ranks.

    Raises:
        RuntimeError: they did.
    """
    if most > MAX_FAILURES:
        raise RuntimeError(
            f"eigendecompositions of a matrix failed {most} times in a row; its gradients may be too large or "
            f"not finite: a lower optim.lr or a larger optim.ridge may help from the newest checkpoint on"
        )


def _change(
    weights: Mapping[str, Sequence[Tensor]],
    returned: list[Returned],
    groups: Mapping[str, Mapping[str, Any]],
    present: Collection[str],
) -> None:
    returned = [update for update in returned if update.parameter in present]
    if not returned:
        return
    of = [groups[update.parameter] for update in returned]
    places = [weights[update.parameter][update.box][update.at] for update in returned]
    moved = [place.float() for place in places]  # themselves, if they are fp32
    torch._foreach_mul_(moved, [1.0 - group["lr"] * group["weight_decay"] for group in of])
    # Two roundings, and not the one of a fused multiply and add, which not every element might get.
    steps = torch._foreach_mul([update.values for update in returned], [group["lr"] for group in of])
    torch._foreach_sub_(moved, steps)
    for place, result in zip(places, moved, strict=True):
        if result is not place:
            place.copy_(result)
