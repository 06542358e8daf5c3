"""What routers did in a step: the losses that keep them balanced, and what the log tells of the load.

Shapes: L layers with experts, E expert.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from models.moe import Routing
from models.moe_config import MoEConfig
from models.transformer import Transformer
from trainer.layout import Layout
from trainer.runtime import Runtime


def auxiliary_loss(moe: MoEConfig, routing: Routing, layout: Layout) -> Tensor:
    """Balancing and z-loss of a rank's micro-batch as its part of the loss of the global batch (rule 1)."""
    balance = routing.balance / _balanced(moe, layout)
    return moe.aux_loss_coef * balance + moe.z_loss_coef * routing.z / layout.global_batch_size


def _balanced(moe: MoEConfig, layout: Layout) -> int:
    """Of how many the balancing loss is the mean: rows, or micro-batches of all ranks together."""
    return layout.global_batch_size if moe.aux_loss_over == "sequence" else layout.accumulation


def move_selection_bias(model: nn.Module, counts_LE: Tensor, rate: float) -> None:
    """Up by `rate` for experts with less than their layer's mean load, down for those with more (Wang et al. 2024,
    algorithm 1). All ranks have the same counts, and so move theirs alike.
    """
    assert isinstance(model, Transformer)
    moves_LE = rate * (counts_LE.mean(dim=1, keepdim=True) - counts_LE).sign()
    for layer, moves_E in zip(model.expert_layers(), moves_LE, strict=True):
        layer.selection_bias += moves_E.to(layer.selection_bias)


class Load:
    """Adds up the routing of a step's micro-batches."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._shape = (0, 0)

    def add(self, routing: Routing) -> None:
        """Add a micro-batch. Nothing waits for the device."""
        self._shape = (routing.counts.shape[0], routing.counts.shape[1])
        scalars = torch.stack([routing.balance.detach(), routing.z.detach(), routing.dropped.sum()]).double()
        sums = torch.cat([scalars, routing.counts.flatten().double()])
        self._sums = sums if self._sums is None else self._sums + sums

    def sum(self, runtime: Runtime) -> Tensor | None:
        """Add up all ranks. (L, E) float64, how often each expert was chosen; None in a dense model."""
        if self._sums is None:
            return None
        self._sums = runtime.sums(self._sums)
        return self._sums[3:].view(self._shape)

    def row(self, moe: MoEConfig | None, layout: Layout) -> dict[str, Any]:
        """Entries of metrics.jsonl for what `sum` added up, the same on every rank; none for a dense model.

        - `aux_loss`, `z_loss`: means over rows and layers, before coefficients; an even load has an aux_loss of 1.
        - `expert_load_max`, `expert_load_min`: the largest and smallest load of an expert over its layer's mean load,
          each of the layer where it is worst.
        - `expert_load_layer`: the layer (counted from 0 among those with experts) with that largest load;
          `expert_load`: of that layer, the load of each expert over the mean.
        - `expert_load_entropy`: of each layer's load, over that of an even one; the least of all layers. 1 is even.
        - `dropped_fraction`: of all assignments of tokens to experts.
        """
        if self._sums is None or moe is None:
            return {}
        layers, counts_LE = self._shape[0], self._sums[3:].view(self._shape)
        n_experts = self._shape[1]
        load_LE = counts_LE / counts_LE.mean(dim=1, keepdim=True).clamp(min=1.0 / n_experts)
        worst = int(load_LE.amax(dim=1).argmax())
        entropy_L = torch.special.entr(load_LE / n_experts).sum(dim=1) / max(math.log(n_experts), 1e-9)
        balance, z, dropped = self._sums[:3].tolist()
        return {
            "aux_loss": balance / (_balanced(moe, layout) * layers),
            "z_loss": z / (layout.global_batch_size * layers),
            "expert_load_max": float(load_LE.max()),
            "expert_load_min": float(load_LE.min()),
            "expert_load_layer": worst,
            "expert_load": [round(load, 4) for load in load_LE[worst].tolist()],
            "expert_load_entropy": float(entropy_L.min()),
            "dropped_fraction": dropped / max(1.0, float(counts_LE.sum())),
        }
