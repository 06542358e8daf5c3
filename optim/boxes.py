"""Which part of a tensor each rank holds, as boxes of indices: the one thing about sharding that optimizers know.

FSDP2, HSDP, tensor and expert parallelism, and any two of them on one dimension, all leave a rank one box. ZeRO, which
cuts a flat row of all parameters wherever it likes, leaves it several (`Parts`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
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


class Ranks(NamedTuple):
    """The ranks of all parameters as one process group, and this process among them; alone, there is no group."""

    group: dist.ProcessGroup | None
    size: int
    mine: int


class Parts(Tensor):
    """A logical tensor of which a rank holds a run of its elements, flattened, as some boxes in one piece of memory.

    It has a shape and a type, and does nothing by itself: who works with it takes `pieces`. To torch's distributed
    checkpoint it is a tensor that this rank has several shards of.
    """

    held: list[list[Box]]
    """By rank of `ranks`: its boxes, one after another in memory. Boxes of all ranks need not be all of the tensor:
    what is left are others' of another group, and no two ranks have the same element."""
    ranks: Ranks
    pieces: list[Tensor]
    """This rank's boxes, as views."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], held: list[list[Box]], ranks: Ranks, run: Tensor) -> Parts:
        """`run`: this rank's elements, one-dimensional; may go on beyond them."""
        result = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=run.dtype, device=run.device)  # type: ignore[attr-defined]
        result.held, result.ranks, result.pieces = held, ranks, []
        begin = 0
        for box in held[ranks.mine]:
            result.pieces.append(run.detach()[begin : begin + box.numel].view(box.shape))
            begin += box.numel
        return result  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parts({tuple(self.shape)}, here {self.here})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a tensor that lies in parts; take its pieces")

    @property
    def here(self) -> list[Box]:
        """This rank's boxes."""
        return self.held[self.ranks.mine]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for box in self.here]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.pieces[[box.start for box in self.here].index(tuple(index.offset or ()))]


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements `start` to `stop` of a tensor, flattened, as boxes in their order."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [Box((start,) if shape else (), (stop,) if shape else ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # of the whole rows, and past them

    def of_row(i: int, begin: int, end: int) -> list[Box]:
        return [Box((i, *box.start), (i + 1, *box.stop)) for box in boxes_of_run(shape[1:], begin, end)]

    if last < first:
        return of_row(last, start - last * row, stop - last * row)
    whole = [Box((first,) + (0,) * (len(shape) - 1), (last, *shape[1:]))] if first < last else []
    head = of_row(first - 1, start - (first - 1) * row, row) if start < first * row else []
    return [*head, *whole, *of_row(last, 0, stop - last * row)]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds, sharing its memory and outside autograd."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def pieces(tensor: Tensor) -> list[Tensor]:
    """What this rank holds box by box, in the order of `held_boxes`, sharing its memory and outside autograd."""
    return tensor.pieces if isinstance(tensor, Parts) else [local(tensor)]


def held_boxes(tensors: Mapping[str, Tensor]) -> dict[str, list[list[Box]]]:
    """What each rank holds of each tensor, in the order of its mesh' ranks; one box of a plain tensor.

    Raises:
        ValueError: a DTensor whose parts are no boxes, or whose values are partial sums.
    """
    known: dict[Any, list[list[Box]]] = {}
    boxes = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Parts):
            boxes[name] = tensor.held
        elif isinstance(tensor, DTensor):
            alike = tuple(tensor.shape), tuple(tensor.device_mesh.shape), tuple(tensor.placements)
            if alike not in known:
                known[alike] = [[box] for box in _held_boxes(*alike)]
            boxes[name] = known[alike]
        else:
            boxes[name] = [[Box((0,) * tensor.ndim, tuple(tensor.shape))]]
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


def ranks_of(tensors: Iterable[Tensor]) -> Ranks:
    """The ranks that hold `tensors`, which all of them call at once: they may make a group.

    Raises:
        ValueError: tensors on meshes of different ranks.
    """
    tensors = list(tensors)
    if tensors and isinstance(tensors[0], Parts):
        (ranks,) = {tensor.ranks for tensor in tensors if isinstance(tensor, Parts)}
        return ranks
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
