"""Which part of a tensor each rank holds, as boxes of indices: the one thing about sharding that optimizers know.

FSDP2, HSDP, tensor and expert parallelism, and any two of them on one dimension, all leave a rank one box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset


class Box(NamedTuple):
    """The indices from `start` up to `stop`, in every dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of every side."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of indices."""
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box:
        """What both have; perhaps nothing."""
        start = tuple(map(max, self.start, other.start))
        return Box(start, tuple(map(max, start, map(min, self.stop, other.stop))))

    def within(self, other: Box) -> tuple[slice, ...]:
        """This box as an index of the tensor that `other` is, which contains it."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, other.start, strict=True))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds, sharing its memory and outside autograd."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def held_boxes(tensors: Mapping[str, Tensor]) -> dict[str, list[Box]]:
    """What each rank holds of each tensor, in the order of its mesh' ranks; one box of a plain tensor.

    Raises:
        ValueError: a DTensor whose parts are no boxes, or whose values are partial sums.
    """
    known: dict[Any, list[Box]] = {}
    boxes = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            alike = tuple(tensor.shape), tuple(tensor.device_mesh.shape), tuple(tensor.placements)
            if alike not in known:
                known[alike] = _held_boxes(*alike)
            boxes[name] = known[alike]
        else:
            boxes[name] = [Box((0,) * tensor.ndim, tuple(tensor.shape))]
    return boxes


def _held_boxes(size: tuple[int, ...], ranks: tuple[int, ...], places: tuple[Placement, ...]) -> list[Box]:
    if any(place.is_partial() for place in places):
        raise ValueError(f"partial sums have no parts: {places}")
    boxes = []
    for at in itertools.product(*map(range, ranks)):
        shape, start = _compute_local_shape_and_global_offset(size, ranks, list(at), places)
        # The offset of an empty part may lie anywhere.
        start = start if math.prod(shape) else (0,) * len(shape)
        boxes.append(Box(tuple(start), tuple(a + n for a, n in zip(start, shape, strict=True))))
    copies = math.prod(n for n, place in zip(ranks, places, strict=True) if place.is_replicate())
    apart = list(dict.fromkeys(box for box in boxes if box.numel))
    if sum(box.numel for box in boxes) != copies * math.prod(size) or any(
        a.meet(b).numel for a, b in itertools.combinations(apart, 2)
    ):
        raise ValueError(f"parts of {size} on a mesh {ranks} by {places} are no boxes")
    return boxes


class Ranks(NamedTuple):
    """The ranks of all parameters as one process group, and this process among them; alone, there is no group."""

    group: dist.ProcessGroup | None
    size: int
    mine: int


def ranks_of(tensors: Iterable[Tensor]) -> Ranks:
    """The ranks that hold `tensors`, which all of them call at once: they may make a group.

    Raises:
        ValueError: tensors on meshes of different ranks.
    """
    meshes = {tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in tensors}
    orders = {None if mesh is None else tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
    if len(orders) != 1:
        raise ValueError(f"parameters of one optimizer live on different ranks: {orders}")
    (order,) = orders
    if order is None or len(order) == 1:
        return Ranks(None, 1, 0)
    flat = next((mesh for mesh in meshes if mesh is not None and mesh.ndim == 1), None)
    group = flat.get_group() if flat is not None else dist.new_group(list(order), use_local_synchronization=True)
    assert tuple(dist.get_process_group_ranks(group)) == order  # boxes are in this order
    return Ranks(group, len(order), dist.get_rank(group))
