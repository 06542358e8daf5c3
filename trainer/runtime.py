"""This process among the others: rank, device, process group, and sums over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import UserError
from common.ranks import is_worker, read_place
from trainer.determinism import deterministic_algorithms

# Longer than any step, evaluation or data set-up that is not stuck.
_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Runtime:
    """Rank and device of this process. `device` is its own GPU, or the CPU."""

    rank: int
    world_size: int
    device: torch.device
    tp: int = 1
    """How many ranks, one after another, read the same rows and compute the same losses."""

    @property
    def data_rank(self) -> int:
        """Which rows this rank reads, as a number below `data_ranks`."""
        return self.rank // self.tp

    @property
    def data_ranks(self) -> int:
        """How many ranks or groups of ranks read different rows."""
        return self.world_size // self.tp

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files and speaks to the terminal."""
        return self.rank == 0

    def sum(self, value: float | torch.Tensor) -> float:
        """Sum of a number over all data ranks, in float64; every rank gets the same."""
        return float(self.sums(torch.as_tensor(value)).item())

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sums of a tensor over all data ranks, in float64."""
        total = values.detach().to(self.device, torch.float64, copy=True)
        dist.all_reduce(total)
        return total / self.tp


@contextmanager
def start_runtime(deterministic: bool = False) -> Iterator[Runtime]:
    """Join the process group that the environment describes (torchrun's variables), or be a group of one.

    Args:
        deterministic: `train.deterministic`.

    Raises:
        UserError: variables that are incomplete, not numbers, or contradict one another or the machine.
    """
    rank, world_size, local_rank = read_place()
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"LOCAL_RANK is {local_rank} but this machine has {torch.cuda.device_count()} GPUs; "
                f"start at most one process per GPU, or set CUDA_VISIBLE_DEVICES= to use the CPU"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if not is_worker():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    with deterministic_algorithms(deterministic):
        yield Runtime(rank, world_size, device)
    # Not after an error: taking down a group of NCCL waits for peers, and these may be waiting for us.
    dist.destroy_process_group()
