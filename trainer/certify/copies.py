"""Whether ranks that hold copies hold the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from optim.boxes import Parts, local


def digest(tensor: Tensor) -> str:
    """Hash of the bits of a tensor, or of a DTensor's part on this rank."""
    bits = local(tensor).contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(bits.data, digest_size=16).hexdigest()


def copies_that_differ(tensors: Mapping[str, Tensor]) -> int:
    """Number of tensors of which two ranks hold different copies; every rank calls it and gets the same number.

    Ranks hold copies of one another where they have the same place along the mesh dimensions that shard the tensor.
    """
    mine: dict[str, tuple[Any, str]] = {}
    for name, tensor in tensors.items():
        place: tuple[int, ...] = ()
        if isinstance(tensor, Parts):
            continue  # of which there are none
        if isinstance(tensor, DTensor):
            if not any(placement.is_replicate() for placement in tensor.placements):
                continue
            coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or []
            pairs = zip(coordinate, tensor.placements, strict=True)
            place = tuple(at for at, placement in pairs if not placement.is_replicate())
        mine[name] = place, digest(tensor)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    copies: dict[tuple[str, Any], set[str]] = {}
    for held in everyone:
        for name, (place, bits) in held.items():
            copies.setdefault((name, place), set()).add(bits)
    return len({name for (name, _), bits in copies.items() if len(bits) > 1})
