"""This process among the others: rank, device, process group, and sums over all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import UserError
from common.ranks import attempt, is_worker, read_place
from trainer.determinism import deterministic_algorithms
from trainer.pulse import FLIGHT_RECORDER, LONGEST, Pulse
from trainer.stop import Stop, Stopping
from trainer.stragglers import OwnTimes

# Longer than any step, evaluation or set-up that is not stuck, where no watch says what is.
_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Runtime:
    """Rank and device of this process. `device` is its own GPU, or the CPU."""

    rank: int
    world_size: int
    device: torch.device
    tp: int = 1
    """How many ranks, one after another, read the same rows and compute the same losses."""
    stop: Stop = field(default_factory=Stop, compare=False)
    """Whether this rank was told to stop."""
    pulse: Pulse = field(default_factory=Pulse, compare=False)
    """Where this rank is."""
    own_times: OwnTimes = field(default_factory=OwnTimes, compare=False)
    """How long each rank took without waiting for others."""

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
        with self.pulse.waiting():
            dist.all_reduce(total)
        return total / self.tp

    def count(self, tokens: int = 0) -> float:
        """Sum of this rank's tokens over all data ranks, before a step or a batch that they are for.

        With it travels whether a rank was told to stop, and how long each took since the last time.

        Raises:
            Stopping: on all ranks, as one was told to.
        """
        sent = torch.zeros(2 + self.world_size, dtype=torch.float64)
        sent[0], sent[1], sent[2 + self.rank] = tokens, float(self.stop.reason is not None), self.pulse.own_seconds()
        total, told, *seconds = self.sums(sent).tolist()
        if told:
            raise Stopping
        self.own_times.add([self.tp * own for own in seconds])
        return float(total)


@contextmanager
def start_runtime(
    deterministic: bool = False, hang_minutes: float | None = None, stop: Stop | None = None
) -> Iterator[Runtime]:
    """Join the process group that the environment describes (torchrun's variables), or be a group of one.

    Args:
        deterministic: `train.deterministic`.
        hang_minutes: `train.hang_minutes`: the watch is to be there before collectives give up.
        stop: what hears of signals, if anything does.

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
    os.environ.setdefault(FLIGHT_RECORDER, "2000")
    if not is_worker():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        timeout = max(_TIMEOUT, timedelta(minutes=2 * LONGEST * (hang_minutes or 0)))
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
        # Rule 12: torch elastic's store outlives an attempt, and holds addresses of its dead.
        store = dist.PrefixStore(f"attempt-{attempt()}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    with deterministic_algorithms(deterministic):
        yield Runtime(rank, world_size, device, stop=stop or Stop())
    # Not after an error: taking down a group of NCCL waits for peers, and these may be waiting for us.
    dist.destroy_process_group()
