"""Tensors in safetensors files, read piece by piece and written one after another: never a whole model in memory.

Files are read with plain reads. Mapped pages would count as this process's memory, and stay.
Imports no torch until a tensor is read: what files hold is known from their headers.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

# safetensors' names of the types that weights come in, torch's, and bytes of a number.
DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
# All that a checkpoint may hold.
STORED = DTYPES | {
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_BLOCK = 1 << 20  # numbers that are converted at a time
_LARGEST_HEADER = 1 << 30
_AGAIN = "bring it again from where a good copy is"
_SHARDING = "DCP_SHARDING_INFO"  # where torch's distributed checkpoint says which part of a tensor a file has


class Part(NamedTuple):
    """A box of a tensor, in a file."""

    path: Path
    begin: int  # first byte in the file
    dtype: str  # safetensors' name
    offsets: Shape  # of the box's first element in the tensor
    shape: Shape  # of the box


class StoredTensors:
    """Tensors by name, each in one file or, as a sharded checkpoint has them, in parts in several.

    Args:
        files: to take tensors from.
        called: what a tensor is called here, from its name in a file; None: it is not taken.
    """

    def __init__(self, files: Sequence[Path], called: Callable[[str], str | None]) -> None:
        self.parts: dict[str, list[Part]] = {}
        for path in files:
            for stored_name, part in _parts(path):
                if (name := called(stored_name)) is not None:
                    self.parts.setdefault(name, []).append(part)
        self.shapes: dict[str, Shape] = {}
        for name, parts in self.parts.items():
            ends = [tuple(o + n for o, n in zip(part.offsets, part.shape, strict=True)) for part in parts]
            shape = self.shapes[name] = tuple(map(max, *ends)) if len(ends) > 1 else ends[0]
            count = sum(math.prod(part.shape) for part in parts)
            if count < math.prod(shape):
                raise UserError(f"{parts[0].path.parent}: a part of '{name}' is in none of the files; {_AGAIN}")
            if count > math.prod(shape):
                first, second = parts[0].path, parts[1].path.name
                raise UserError(f"{first}: has '{name}', as {second} has once more; give the files of one model only")

    def same(self, a: str, b: str) -> bool:
        """Whether two tensors hold the same numbers, of whatever types. A block of each is in memory at a time."""
        if self.shapes[a] != self.shapes[b] or any(p.dtype not in DTYPES for n in (a, b) for p in self.parts[n]):
            return False
        n_rows, step = self.shapes[a][0], max(1, _BLOCK // math.prod(self.shapes[a][1:]))
        stops = [(at, min(at + step, n_rows)) for at in range(0, n_rows, step)]
        return all(bool((self.read(a, *rows) == self.read(b, *rows)).all()) for rows in stops)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor, fp32; all if not given. Nothing else is read."""
        import torch

        shape = self.shapes[name]
        rows = torch.empty((shape[0] if stop is None else stop) - start, *shape[1:], dtype=torch.float32)
        for part in self.parts[name]:
            if part.shape[1:] == shape[1:]:  # its rows are whole, so that all lies in one piece, here and in the file
                width = math.prod(shape[1:])
                flat = Part(part.path, part.begin, part.dtype, (part.offsets[0] * width,), (math.prod(part.shape),))
                _read_part(flat, rows.view(-1), start * width)
            else:
                _read_part(part, rows, start)
        return rows


def _read_part(part: Part, rows: Tensor, start: int) -> None:
    """Fill in what a part has of rows `start`, `start` + 1, ... of its tensor."""
    import torch

    first, last = max(start, part.offsets[0]), min(start + len(rows), part.offsets[0] + part.shape[0])
    if first >= last:
        return
    width = math.prod(part.shape[1:])
    step = max(1, _BLOCK // width) if width else 1
    inner = tuple(slice(o, o + n) for o, n in zip(part.offsets[1:], part.shape[1:], strict=True))
    dtype, size = DTYPES[part.dtype]
    with open(part.path, "rb", buffering=0) as file:
        file.seek(part.begin + (first - part.offsets[0]) * width * size)
        for at in range(first, last, step):
            block = torch.empty(min(step, last - at), *part.shape[1:], dtype=getattr(torch, dtype))
            _fill(block, file, part.path)
            rows[(slice(at - start, at - start + len(block)), *inner)] = block.to(torch.float32)


def _fill(block: Tensor, file: io.FileIO, path: Path) -> None:
    import torch

    room = memoryview(block.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    while room:
        n = file.readinto(room)
        if not n:
            raise _cut_short(path)
        room = room[n:]


def _parts(path: Path) -> Iterator[tuple[str, Part]]:
    """Names of the tensors of a file, and which part of each it has. Raises `UserError` if it is damaged."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            data, size = 8 + length, os.fstat(file.fileno()).st_size
            if data > size or length > _LARGEST_HEADER:
                raise _cut_short(path)
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        places = json.loads(metadata[_SHARDING]) if _SHARDING in metadata else {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            offsets = tuple(places[name]["saved_offsets"]) if places else (0,) * len(shape)
            numbers = (begin, end, *shape, *offsets)
            if len(shape) != len(offsets) or any(not isinstance(n, int) or n < 0 for n in numbers):
                raise ValueError
            if data + end > size:
                raise _cut_short(path)
            if entry["dtype"] in DTYPES and end - begin != math.prod(shape) * DTYPES[entry["dtype"]][1]:
                raise ValueError
            if 0 not in shape:  # a rank that has no part of a tensor may say so
                yield name, Part(path, data + begin, entry["dtype"], offsets, shape)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: no safetensors file; {_AGAIN}") from None


def _cut_short(path: Path) -> UserError:
    return UserError(f"{path}: cut short, or no safetensors file; {_AGAIN}")


class Item(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: Shape
    dtype: str  # safetensors' name
    offsets: Shape | None = None  # of its first element in the tensor that it is a box of; None: it is whole

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * STORED[self.dtype][1]


class PlannedFile(NamedTuple):
    """A file to be written: its header is known before the first tensor is."""

    name: str
    items: tuple[Item, ...]
    header: bytes

    @property
    def bytes(self) -> int:
        return len(self.header) + sum(item.bytes for item in self.items)


def plan_files(
    items: Sequence[Item], max_bytes: int, name: Callable[[int, int], str], sharded: bool = False
) -> list[PlannedFile]:
    """Spread tensors over files in their order.

    Args:
        items: what to write.
        max_bytes: most bytes of tensors in a file; a larger tensor has a file for itself.
        name: of file i (from 1) of n.
        sharded: whether torch's distributed checkpoint reads the files.
    """
    groups: list[list[Item]] = [[]]
    for item in items:
        if groups[-1] and sum(other.bytes for other in groups[-1]) + item.bytes > max_bytes:
            groups.append([])
        groups[-1].append(item)
    return [
        PlannedFile(name(number, len(groups)), tuple(group), file_header(group, sharded))
        for number, group in enumerate(groups, start=1)
    ]


def file_header(items: Sequence[Item], sharded: bool) -> bytes:
    """What a file begins with; the items follow in their order, without gaps."""
    metadata = {"format": "pt"}
    if sharded:
        metadata[_SHARDING] = json.dumps(
            {item.name: {"saved_offsets": item.offsets or [0] * len(item.shape)} for item in items}
        )
    tree: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for item in items:
        tree[item.name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": [begin, begin + item.bytes]}
        begin += item.bytes
    text = json.dumps(tree, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # numbers then lie at multiples of their size
    return len(text).to_bytes(8, "little") + text


def write_file(folder: Path, file: PlannedFile, make: Callable[[str], Tensor]) -> None:
    """Write a planned file, whole or not at all, with the tensors that `make` gives for their names.

    Raises:
        UserError: a number is too large for the type.
    """
    partial = folder / f".{file.name}.partial"
    with open(partial, "wb") as output:
        output.write(file.header)
        for item in file.items:
            _write(output, make(item.name), item)
        output.flush()
        os.fsync(output.fileno())
    os.replace(partial, folder / file.name)


def _write(output: BinaryIO, tensor: Tensor, item: Item) -> None:
    import torch

    assert tuple(tensor.shape) == item.shape, (item, tensor.shape)
    for block in tensor.contiguous().view(-1).split(_BLOCK):
        converted = block.to(getattr(torch, DTYPES[item.dtype][0]))
        if item.dtype == "F16" and not bool((torch.isfinite(converted) | ~torch.isfinite(block)).all()):
            raise UserError(f"'{item.name}' has numbers that fp16 cannot hold; give --dtype bf16 or fp32")
        output.write(memoryview(converted.view(torch.uint8).numpy()))  # type: ignore[arg-type]
