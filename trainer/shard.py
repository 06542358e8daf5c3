"""What one rank writes of a checkpoint: a safetensors file that is laid out once and filled from save to save.

torch's distributed checkpoint (DCP) plans which rank writes which part of which tensor, and reads the files. It does
not write them: its writer puts a file together in memory once more, holds the interpreter's lock meanwhile, and syncs
the file before the last bytes have left the buffer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.optim import Optimizer

from common.files import sync_directory
from optim.boxes import local
from trainer.exchange.tensors import STORED, Item, file_header

_BLOCK = 1 << 26
_NAMES = {getattr(torch, name): stored for stored, (name, _) in STORED.items()}


class Shard:
    """This rank's file of every checkpoint of a run. The state's names and shapes must not change between saves."""

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
        self._items = [
            Item(
                w.index.fqn,
                tuple(w.tensor_data.chunk.sizes),
                _NAMES[w.tensor_data.properties.dtype],
                tuple(w.tensor_data.chunk.offsets),
            )
            for w in writes
        ]
        assert len({item.name for item in self._items}) == len(self._items), "a rank has one part of a tensor"
        self.name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        self.header = file_header(self._items, sharded=True)
        self._buffer: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def bytes(self) -> int:
        """Size of the file; 0: this rank has none to write."""
        return len(self.header) + sum(item.bytes for item in self._items) if self._items else 0

    def live(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """The parts of the state that this rank writes, in the order of the file; they change as training goes on."""
        parts: list[Tensor] = []
        for item in self._items:
            part = local(state[item.name])
            assert tuple(part.shape) == item.shape, item
            parts.append(part)
        return parts

    def stage(self, state: Mapping[str, Tensor], optimizer: Optimizer) -> list[Tensor]:
        """A copy of the live parts, in memory that is there from the first call on. On a GPU it is only begun.

        The update after that waits for the copy; forward and backward of the step do not.
        """
        live = self.live(state)
        on_gpu = any(part.is_cuda for part in live)
        if self._buffer is None:
            self._buffer = torch.empty(sum(i.bytes for i in self._items), dtype=torch.uint8, pin_memory=on_gpu)
            if on_gpu:
                self._stream = torch.cuda.Stream()
                optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_stream(self._stream))
        places, begin = [], 0
        for item, part in zip(self._items, live, strict=True):
            places.append(self._buffer[begin : begin + item.bytes].view(part.dtype).view(item.shape))
            begin += item.bytes
        if on_gpu:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                _copy(places, live)
                self._copied = self._stream.record_event()
        else:
            _copy(places, live)
        return [self._buffer]

    def write(self, folder: Path, parts: Iterable[Tensor]) -> dict[str, Any]:
        """Write `live` or `stage`d parts into a checkpoint's folder; when this returns they are durable.

        Returns the file's entry in the manifest; the hash is of what was to be written, not of what is read back.
        """
        if self._copied is not None:
            self._copied.synchronize()
        folder.mkdir(parents=True, exist_ok=True)  # on a file system that rank 0 does not share, which finds out
        digest, size = hashlib.blake2b(digest_size=32), 0
        with open(folder / self.name, "wb") as file, ThreadPoolExecutor(1) as beside:
            for block in _blocks(self.header, parts):
                hashed = beside.submit(digest.update, block)
                file.write(block)
                size += len(block)
                hashed.result()
            file.flush()
            os.fsync(file.fileno())
        sync_directory(folder)
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
