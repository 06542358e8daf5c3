"""The optimizer of matrices: a rule on whole matrices, exact under every sharding, and AdamW on everything else.

A step is: all ranks agree on what has gradients; AdamW updates its parameters; owners update matrices
(optim/owners.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from optim.boxes import held_boxes, local, pieces, ranks_of
from optim.elementwise import elementwise
from optim.exchange import BUCKET_SIZE
from optim.owners import Owners, refuse_failures
from optim.ownership import Matrix
from optim.rule import Rule


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
        self._named = {n: p for g in self.param_groups for n, p in zip(g["names"], g["params"], strict=True)}
        self._with_matrices = list(matrices)
        self._group_of = {n: g for g in self.param_groups for n in g["names"]}
        others = [g for g in self.param_groups if not any(n in matrices for n in g["names"])]
        # Groups are shared, so that who sets a learning rate here sets it there.
        self._adamw = elementwise(others, "adamw") if others else None
        self.ranks = ranks_of(self._named.values())
        self.device = local(next(iter(self._named.values()))).device
        held = held_boxes({name: self._named[name] for name in matrices})
        every = [matrix for those in matrices.values() for matrix in those]
        self._matrices = Owners(every, held, self.ranks, rule, self.device, bucket_size)

    @property
    def rule(self) -> Rule:
        """What moves matrices."""
        return self._matrices.rule

    @property
    def matrices(self) -> list[Matrix]:
        """All of them, on every rank."""
        return self._matrices.matrices

    @property
    def owners(self) -> list[int]:
        """The rank that updates each of `matrices`."""
        return self._matrices.owners

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
        weights = {name: pieces(self._named[name]) for name in self._with_matrices}
        gradients = {
            name: [torch.zeros_like(part) for part in weights[name]] if grad is None else pieces(grad)
            for name, grad in ((name, self._named[name].grad) for name in self._with_matrices)
        }
        self._matrices.update(gradients, weights, self._group_of, present)

    def _agree(self) -> set[str]:
        """Names of parameters that have a gradient anywhere. The one other thing to agree on is whether to go on."""
        most = self._matrices.failures()
        votes = torch.tensor([*(p.grad is not None for p in self._named.values()), most], dtype=torch.int32)
        if self.ranks.group is not None:
            votes = votes.to(self.device)
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.ranks.group)
        *present, most = votes.tolist()
        refuse_failures(most)
        return {name for name, vote in zip(self._named, present, strict=True) if vote}

    def named_state(self) -> dict[str, Tensor]:
        """State by name of parameter, state and, of several matrices, number: `blocks.0.attention.wq.weight.momentum`.

        Of matrices each rank has those that it owns. All are views of what is live.
        """
        result = self._matrices.named_state()
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
