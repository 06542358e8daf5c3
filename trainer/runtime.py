"""This process among the others: rank, device, process group, and sums over all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import UserError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Longer than any step, evaluation or data set-up that is not stuck.
_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Runtime:
    """Rank and device of this process. `device` is its own GPU, or the CPU."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files and speaks to the terminal."""
        return self.rank == 0

    def sum(self, value: float | torch.Tensor) -> float:
        """Sum of a number over all ranks, in float64; every rank gets the same."""
        total = torch.as_tensor(value, dtype=torch.float64, device=self.device).clone()
        dist.all_reduce(total)
        return float(total.item())


@contextmanager
def start_runtime() -> Iterator[Runtime]:
    """Join the process group that the environment describes (torchrun's variables), or be a group of one.

    Raises:
        UserError: variables that are incomplete, not numbers, or contradict one another or the machine.
    """
    rank, world_size, local_rank = _read_environment()
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"LOCAL_RANK is {local_rank} but this machine has {torch.cuda.device_count()} GPUs; "
                f"start at most one process per GPU"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    device_id = device if device.type == "cuda" else None
    if world_size == 1 and "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device_id)
    else:
        dist.init_process_group(backend, timeout=_TIMEOUT, device_id=device_id)
    try:
        yield Runtime(rank, world_size, local_rank, device)
    finally:
        dist.destroy_process_group()


def _read_environment() -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK; a process that was started alone is rank 0 of 1."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 0, 1, 0
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set though {'RANK' if 'RANK' in os.environ else 'WORLD_SIZE'} is; "
            f"start workers with torchrun or `gramian train --nproc N`, or unset RANK and WORLD_SIZE"
        )
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UserError(f"RANK is {rank} but must lie in 0..{world_size - 1} (WORLD_SIZE {world_size})")
    # Without LOCAL_RANK all ranks are taken to be on this machine; on a machine without GPUs it does not matter.
    return rank, world_size, _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise UserError(f"environment variable {name} must be a number, got {text!r}")
    return int(text)
