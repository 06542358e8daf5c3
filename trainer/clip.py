"""One gradient norm over all parameters (rule 5)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# Elements converted to float64 at a time, to bound the memory of the conversion.
_CHUNK = 1 << 24


def global_norm(gradients: Iterable[Tensor]) -> float:
    """Euclidean norm over all gradients, the same number on every rank.

    Sums of squares are in float64: torch's fp32 norm on the CPU is off by 1e-5 at a million elements and by 1e-2 at a
    hundred million, and changes with the number of shards. Each element is counted once: squares are summed over the
    mesh dimensions that shard a tensor and not over those that hold copies.
    """
    sums: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    for gradient in gradients:
        groups: tuple[dist.ProcessGroup, ...] = ()
        local = gradient
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            groups = tuple(
                mesh.get_group(dim) for dim, place in enumerate(gradient.placements) if not place.is_replicate()
            )
            local = gradient.to_local()
        square = _sum_of_squares(local)
        sums[groups] = sums[groups] + square if groups in sums else square
    total = 0.0
    for groups, square in sums.items():
        for group in groups:
            dist.all_reduce(square, group=group)
        total += float(square.item())
    return float(total**0.5)


def disjoint_norm(parts: Iterable[Tensor]) -> float:
    """Like `global_norm`, of what ranks hold of gradients that no two of them have the same element of."""
    squares = [_sum_of_squares(part) for part in parts]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return float(total.item() ** 0.5)


def _sum_of_squares(tensor: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for chunk in tensor.detach().reshape(-1).split(_CHUNK):
        double = chunk.double()
        total += torch.dot(double, double)
    return total
