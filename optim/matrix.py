"""The optimizer of matrices: a rule on whole matrices, exact under every sharding, and AdamW on everything else.

Each matrix has an owner, which alone keeps its state and computes its update. A step is: all ranks agree on what has
gradients; parts of gradients travel to owners; owners apply the rule; parts of updates travel back. So nothing is
computed twice, and a rank's memory and work are its share of the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW, Optimizer

from optim.boxes import held_boxes, local, ranks_of
from optim.exchange import BUCKET_SIZE, Bucket, Index, buckets
from optim.ownership import Matrix, choose_owners
from optim.rule import MAX_FAILURES, Rule


@dataclass
class Batch:
    """This rank's matrices of one shape in one bucket."""

    matrices: list[Matrix]
    numbers: list[int]  # in the bucket
    state: dict[str, Tensor]  # [B, ...], fp32
    steps: Tensor  # (B,) int64, on the host: updates so far


class MatrixOptimizer(Optimizer):
    """`rule` for parameters that have matrices, AdamW for the others, in one object with one list of groups.

    Groups have `lr`, `weight_decay` and `names`; those of AdamW also its `betas` and `eps`. Parameters are plain
    tensors, or DTensors whose meshes are made of the same ranks. Decay is decoupled: `W <- (1 - lr decay) W - lr U`.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: Mapping[str, Sequence[Matrix]],
        rule: Rule,
        bucket_size: int = BUCKET_SIZE,
    ):
        """`matrices` by parameter; a parameter without any is AdamW's. All ranks make theirs at once."""
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.rule = rule
        self._named = {n: p for g in self.param_groups for n, p in zip(g["names"], g["params"], strict=True)}
        self._with_matrices = set(matrices)
        self._group_of = {n: g for g in self.param_groups for n in g["names"]}
        others = [g for g in self.param_groups if not any(n in matrices for n in g["names"])]
        # Groups are shared, so that who sets a learning rate here sets it there. Not torch's fused kernels, which round
        # the last elements of a tensor otherwise than those before.
        self._adamw = AdamW(others, foreach=True) if others else None
        for group in others:
            for parameter in group["params"]:
                self._adamw.state[parameter] = {  # type: ignore[union-attr]
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        self.ranks = ranks_of(self._named.values())
        self.device = local(next(iter(self._named.values()))).device
        held = held_boxes({name: self._named[name] for name in matrices})
        self.matrices = [matrix for those in matrices.values() for matrix in those]
        self.owners = choose_owners(self.matrices, held, rule.cost, self.ranks.size)
        self._buckets = buckets(self.matrices, self.owners, held, self.ranks, bucket_size)
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

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update what has a gradient on any rank; where this one lacks it, it counts as zeros.

        Raises:
            RuntimeError: on all ranks alike, eigendecompositions of a matrix failed too often in a row.
        """
        assert closure is None
        present = self._agree()
        for name in present:
            parameter = self._named[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._adamw is not None:
            self._adamw.step()
        self._update_matrices(present)

    def _agree(self) -> set[str]:
        """Names of parameters that have a gradient anywhere. The one other thing to agree on is whether to go on."""
        failures = [batch.state["failures"].max() for batch in self._owned() if "failures" in batch.state]
        most = int(torch.stack(failures).max()) if failures else 0
        votes = torch.tensor([*(p.grad is not None for p in self._named.values()), most], dtype=torch.int32)
        if self.ranks.group is not None:
            votes = votes.to(self.device)
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.ranks.group)
        *present, most = votes.tolist()
        if most > MAX_FAILURES:
            raise RuntimeError(
                f"eigendecompositions of a matrix failed {most} times in a row; its gradients may be too large or "
                f"not finite: a lower optim.lr or a larger optim.ridge may help from the newest checkpoint on"
            )
        return {name for name, vote in zip(self._named, present, strict=True) if vote}

    def _update_matrices(self, present: set[str]) -> None:
        gradients = {
            name: local(p.grad) if p.grad is not None else torch.zeros_like(local(p))
            for name, p in self._named.items()
            if name in self._with_matrices
        }
        used = [k for k, bucket in enumerate(self._buckets) if any(m.parameter in present for m in bucket.matrices)]
        arriving: list[Callable[[], dict[int, Tensor]]] = []
        returning: list[Callable[[], list[tuple[str, Index, Tensor]]]] = []
        for k, following in itertools.pairwise([None, *used, None]):
            # While this rank works on a bucket's matrices, the next bucket arrives and the last one returns.
            wholes = arriving.pop()() if arriving else {}
            if following is not None:
                arriving.append(self._buckets[following].gather(gradients, self.device, share=True))
            if k is not None:
                updates = self._apply_rule(self._batches[k], wholes, present)
                if returning:
                    self._change_weights(returning.pop()(), present)
                returning.append(self._buckets[k].scatter(updates, self.device))
        if returning:
            self._change_weights(returning.pop()(), present)

    def _apply_rule(self, batches: list[Batch], wholes: dict[int, Tensor], present: set[str]) -> dict[int, Tensor]:
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

    def _change_weights(self, pieces: list[tuple[str, Index, Tensor]], present: set[str]) -> None:
        pieces = [piece for piece in pieces if piece[0] in present]
        if not pieces:
            return
        groups = [self._group_of[name] for name, _, _ in pieces]
        weights = [local(self._named[name])[at] for name, at, _ in pieces]
        moved = [weight.float() for weight in weights]  # themselves, if they are fp32
        torch._foreach_mul_(moved, [1.0 - group["lr"] * group["weight_decay"] for group in groups])
        # Two roundings, and not the one of a fused multiply and add, which not every element might get.
        steps = torch._foreach_mul([update for _, _, update in pieces], [group["lr"] for group in groups])
        torch._foreach_sub_(moved, steps)
        for weight, result in zip(weights, moved, strict=True):
            if result is not weight:
                weight.copy_(result)

    def _owned(self) -> Iterator[Batch]:
        for batches in self._batches:
            yield from batches

    def named_state(self) -> dict[str, Tensor]:
        """State by name of parameter, state and, of several matrices, number: `blocks.0.attention.wq.weight.momentum`.

        Of matrices each rank has those that it owns. All are views of what is live.
        """
        result: dict[str, Tensor] = {}
        for batch in self._owned():
            for row, matrix in enumerate(batch.matrices):
                for name, tensor in (*batch.state.items(), ("step", batch.steps)):
                    result[matrix.state_name(name)] = tensor[row] if tensor.ndim > 1 else tensor[row : row + 1]
        if self._adamw is not None:
            names = {parameter: name for name, parameter in self._named.items()}
            for parameter, state in self._adamw.state.items():
                for key, value in state.items():
                    result[f"{names[parameter]}.{key}"] = value if value.ndim else value.view(1)
        return result

    def state_dict(self) -> dict[str, Any]:
        """`named_state`. torch's own would leave out what owners keep."""
        return dict(self.named_state())

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy a `named_state` back, in its own precision; it may have more than this rank owns."""
        for name, tensor in self.named_state().items():
            tensor.copy_(state_dict[name])
