"""What routers did in a step: the losses that keep them balanced, and what the log tells of the load.

Shapes: L layers with experts, E expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.moe import Routing
from models.moe_config import MoEConfig
from trainer.runtime import Runtime


def auxiliary_loss(moe: MoEConfig, routing: Routing, n_rows: int) -> Tensor:
    """Balancing and z-loss of a micro-batch as its part of the loss of a global batch of `n_rows` (rule 1)."""
    return (moe.aux_loss_coef * routing.balance + moe.z_loss_coef * routing.z) / n_rows


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

    def row(self, runtime: Runtime, n_rows: int) -> dict[str, float]:
        """Entries of metrics.jsonl for a global batch of `n_rows`, the same on every rank; none for a dense model.

        - `aux_loss`, `z_loss`: means over rows and layers, before coefficients; an even load has an aux_loss of 1.
        - `expert_load_max`, `expert_load_min`: of the layer where it is worst, the largest and smallest load of an
          expert over the mean load.
        - `dropped_fraction`: of all assignments of tokens to experts.
        """
        if self._sums is None:
            return {}
        sums = runtime.sums(self._sums)
        layers, counts_LE = self._shape[0], sums[3:].view(self._shape)
        load_LE = counts_LE / counts_LE.mean(dim=1, keepdim=True).clamp(min=1.0 / self._shape[1])
        balance, z, dropped = sums[:3].tolist()
        return {
            "aux_loss": balance / (n_rows * layers),
            "z_loss": z / (n_rows * layers),
            "expert_load_max": float(load_LE.max()),
            "expert_load_min": float(load_LE.min()),
            "dropped_fraction": dropped / max(1.0, float(counts_LE.sum())),
        }
