"""Optimizers of parameters that lie one after another in flat tensors, cut wherever a partition ends, as ZeRO has them.

To elementwise optimizers a cut is nothing. Rules for matrices get whole ones from their owners (optim/owners.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from optim.boxes import Box, Parts, Ranks
from optim.build import make_rule
from optim.config import OptimConfig
from optim.elementwise import elementwise
from optim.owners import Owners, refuse_failures
from optim.ownership import Matrix, matrices_of


@dataclass(frozen=True)
class Place:
    """Where a parameter lies: `start` of this rank's first element in the flat tensor; by rank, the boxes that it has.

    `shape` is that of the logical parameter. The boxes of all ranks are less than it where others have other experts.
    """

    start: int
    shape: tuple[int, ...]
    held: list[list[Box]]


class Flat:
    """This rank's part of some parameters, in one flat tensor; `places` by name, in their order."""

    def __init__(self, tensor: Tensor, places: Mapping[str, Place], ranks: Ranks) -> None:
        self.tensor, self.places, self.ranks = tensor.detach(), dict(places), ranks

    def parts(self, run: Tensor | None = None) -> dict[str, Parts]:
        """The parameters, or what another flat tensor of the same order has of them, by name; shares its memory."""
        flat = (self.tensor if run is None else run).detach().view(-1)
        return {n: Parts(p.shape, p.held, self.ranks, flat[p.start :]) for n, p in self.places.items()}


class FlatOptimizer(Optimizer):
    """Updates flat tensors that somebody puts into its groups, and gives their state by the parameters' names.

    It is made with the parameters themselves. Who flattens them puts a flat tensor with a `grad` in their place in a
    group, at once or for each `step`, and says once what is in it (`take`).
    """

    def __init__(self, groups: Sequence[dict[str, Any]], config: OptimConfig) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._config = config
        self._updates: dict[int, _Elementwise | _Matrices] = {}
        self.scale = 1.0
        """What gradients are multiplied by before they are used, as clipping wants it."""

    def take(
        self,
        tensor: Tensor,
        flat: Flat,
        roles: Mapping[str, Mapping[str, Any]],
        group: dict[str, Any],
        make: Callable[[dict[str, Any]], Optimizer] | None = None,
    ) -> None:
        """Get to know a flat tensor of `group`, and make its state. All ranks take theirs in one order.

        Args:
            tensor: what will be in the group.
            flat: what it has.
            roles: as the model declares them.
            make: another elementwise optimizer than torch's, with its state, of a group whose parameter is `tensor`.
        """
        if self._config.has_matrices(group["role"]):
            self._updates[id(tensor)] = _Matrices(tensor, flat, roles, self._config)
        else:
            alone = {**group, "params": [tensor]}
            name, options = ("adamw", {}) if self._config.is_rule else (self._config.name, self._config.resolved())
            inner = elementwise([alone], name, options) if make is None else make(alone)
            self._updates[id(tensor)] = _Elementwise(flat, inner)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the flat tensors that are in the groups now.

        Raises:
            RuntimeError: on all ranks alike, eigendecompositions of a matrix failed too often in a row.
        """
        assert closure is None
        for group in self.param_groups:
            for tensor in group["params"]:
                if self.scale != 1.0:
                    tensor.grad.mul_(self.scale)
                self._updates[id(tensor)].step(tensor, group)

    def owners(self) -> list[Owners]:
        """The owners of matrices, of each flat tensor that has any."""
        return [update.owners for update in self._updates.values() if isinstance(update, _Matrices)]

    def named_state(self) -> dict[str, Tensor]:
        """State by name, as `optim.build.named_state` gives it of other optimizers; views of what is live."""
        return {name: tensor for update in self._updates.values() for name, tensor in update.named_state().items()}

    def loaded(self) -> None:
        """What `named_state` gave has been written to."""
        for update in self._updates.values():
            update.loaded()


class _Elementwise:
    def __init__(self, flat: Flat, inner: Optimizer) -> None:
        self._flat, self._inner = flat, inner
        (self._state,) = inner.state.values()
        # Some count in tensors and some in numbers, which nothing can be loaded into.
        step = self._state.get("step")
        self._step = step.view(1) if isinstance(step, Tensor) else torch.zeros(1)
        self._counts = step is not None

    def step(self, tensor: Tensor, group: dict[str, Any]) -> None:
        self._inner.param_groups[0]["lr"] = group["lr"]
        self._inner.step()
        if self._counts and not isinstance(self._state["step"], Tensor):
            self._step.fill_(float(self._state["step"]))

    def named_state(self) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for key, value in self._state.items():
            if key != "step":
                result |= {f"{name}.{key}": part for name, part in self._flat.parts(value).items()}
        if self._counts:
            result |= {f"{name}.step": self._step for name in self._flat.places}
        return result

    def loaded(self) -> None:
        if self._counts and not isinstance(self._state["step"], Tensor):
            self._state["step"] = int(self._step)


class _Matrices:
    def __init__(self, tensor: Tensor, flat: Flat, roles: Mapping[str, Mapping[str, Any]], config: OptimConfig) -> None:
        self._flat = flat
        self._weights = {name: parts.pieces for name, parts in flat.parts().items()}
        here: list[Matrix] = []
        for name, place in flat.places.items():
            boxes = [box for those in place.held for box in those]
            # The others are of experts that ranks of another group have.
            here += [
                matrix
                for matrix in matrices_of(name, place.shape, roles[name], config.split_heads)
                if any(matrix.box.meet(box).numel for box in boxes)
            ]
        held = {name: place.held for name, place in flat.places.items()}
        self.owners = Owners(here, held, flat.ranks, make_rule(config), tensor.device)

    def step(self, tensor: Tensor, group: dict[str, Any]) -> None:
        if self.owners.can_fail:
            most = torch.tensor(self.owners.failures(), device=tensor.device)
            if self._flat.ranks.group is not None:
                dist.all_reduce(most, dist.ReduceOp.MAX, group=self._flat.ranks.group)
            refuse_failures(int(most))
        assert tensor.grad is not None
        gradients = {name: parts.pieces for name, parts in self._flat.parts(tensor.grad).items()}
        self.owners.update(gradients, self._weights, dict.fromkeys(gradients, group), gradients.keys())

    def named_state(self) -> dict[str, Tensor]:
        return self.owners.named_state()

    def loaded(self) -> None:
        return  # into what is live
