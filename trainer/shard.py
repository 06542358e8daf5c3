"""What one rank writes of a checkpoint: a safetensors file, or a few, laid out once and filled from save to save.

torch's distributed checkpoint (DCP) plans which rank writes which part of which tensor, and reads the files. It does
not write them: its writer puts a file together in memory once more, holds the interpreter's lock meanwhile, and syncs
the file before the last bytes have left the buffer.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.optim import Optimizer

from common.files import sync_directory
from optim.boxes import Parts, local
from trainer.exchange.tensors import STORED, Item, file_header

_BLOCK = 1 << 26
_NAMES = {getattr(torch, name): stored for stored, (name, _) in STORED.items()}


class _File(NamedTuple):
    name: str
    header: bytes
    items: list[Item]

    @property
    def bytes(self) -> int:
        """Of the items."""
        return sum(item.bytes for item in self.items)


class Shard:
    """This rank's files of every checkpoint of a run. The state's names and shapes must not change between saves."""

    def __init__(self, state: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """All ranks of `group` plan together: of what several have, one writes it."""
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(state), is_coordinator=rank == 0)
        plans: list[Any] = [None] * world_size
        dist.gather_object(planner.create_local_plan(), plans if rank == 0 else None, group=group)
        if rank == 0:
            plans, _ = planner.create_global_plan(plans)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, plans if rank == 0 else None, group=group)
        # Wider types first: then every number lies at a multiple of its size.
        writes = sorted(mine[0].items, key=lambda w: (-w.tensor_data.properties.dtype.itemsize, w.index.fqn))
        # A file has a name but once: of what a rank has several parts of, each is in another file.
        by_file: list[list[Item]] = []
        seen: Counter[str] = Counter()
        for w in writes:
            name, chunk = w.index.fqn, w.tensor_data.chunk
            stored = _NAMES[w.tensor_data.properties.dtype]
            if seen[name] == len(by_file):
                by_file.append([])
            by_file[seen[name]].append(Item(name, tuple(chunk.sizes), stored, tuple(chunk.offsets)))
            seen[name] += 1
        self.name = f"shard-{rank + 1:05d}"
        """What the names of its files begin with."""
        self._files = [
            _File(
                f"{self.name}-model-{i + 1:05d}-of-{len(by_file):05d}.safetensors",
                file_header(items, sharded=True),
                items,
            )
            for i, items in enumerate(by_file)
        ]
        self._buffer: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def bytes(self) -> int:
        """Size of the files; 0: this rank has none to write."""
        return sum(len(file.header) + file.bytes for file in self._files)

    def live(self, state: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """The parts of the state that this rank writes, by file, in its order; they change as training goes on."""

        def part(item: Item) -> Tensor:
            held = state[item.name]
            if isinstance(held, Parts):
                return held.pieces[[box.start for box in held.here].index(item.offsets or ())]
            return local(held)

        parts = [[part(item) for item in file.items] for file in self._files]
        for file, those in zip(self._files, parts, strict=True):
            assert [item.shape for item in file.items] == [tuple(part.shape) for part in those], file.name
        return parts

    def stage(self, state: Mapping[str, Tensor], optimizer: Optimizer) -> list[list[Tensor]]:
        """A copy of the live parts, in memory that is there from the first call on. On a GPU it is only begun.

        The update after that waits for the copy; forward and backward of the step do not.
        """
        live = [part for those in self.live(state) for part in those]
        items = [item for file in self._files for item in file.items]
        on_gpu = any(part.is_cuda for part in live)
        if self._buffer is None:
            self._buffer = torch.empty(sum(i.bytes for i in items), dtype=torch.uint8, pin_memory=on_gpu)
            if on_gpu:
                self._stream = torch.cuda.Stream()
                optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_stream(self._stream))
        places, begin = [], 0
        for item, part in zip(items, live, strict=True):
            places.append(self._buffer[begin : begin + item.bytes].view(part.dtype).view(item.shape))
            begin += item.bytes
        if on_gpu:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                _copy(places, live)
                self._copied = self._stream.record_event()
        else:
            _copy(places, live)
        return [[part] for part in self._buffer.split([file.bytes for file in self._files])]

    def write(self, folder: Path, parts: Sequence[Iterable[Tensor]]) -> dict[str, dict[str, Any]]:
        """Write `live` or `stage`d parts into a checkpoint's folder; when this returns they are durable.

        Returns the entries of the files in the manifest; hashes are of what was to be written, not of what is read
        back.
        """
        if not self._files:
            return {}
        if self._copied is not None:
            self._copied.synchronize()
        folder.mkdir(parents=True, exist_ok=True)  # on a file system that rank 0 does not share, which finds out
        entries = {file.name: _write(folder, file, those) for file, those in zip(self._files, parts, strict=True)}
        sync_directory(folder)
        return entries


def _write(folder: Path, file: _File, parts: Iterable[Tensor]) -> dict[str, Any]:
    digest, size = hashlib.blake2b(digest_size=32), 0
    with open(folder / file.name, "wb") as output, ThreadPoolExecutor(1) as beside:
        for block in _blocks(file.header, parts):
            hashed = beside.submit(digest.update, block)
            output.write(block)
            size += len(block)
            hashed.result()
        output.flush()
        os.fsync(output.fileno())
    return {"bytes": size, "blake2b": digest.hexdigest()}


def _copy(places: list[Tensor], live: list[Tensor]) -> None:
    for place, part in zip(places, live, strict=True):
        place.copy_(part, non_blocking=True)


def _blocks(header: bytes, parts: Iterable[Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for part in parts:
        flat = part.cpu().contiguous().view(-1).view(torch.uint8)
        for block in flat.split(_BLOCK):
            yield memoryview(block.numpy())  # type: ignore[arg-type]
