"""How a loop ends before its last step: because it was told to stop, or because it hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist

from common.errors import Requeue
from trainer.outcome import write_outcome
from trainer.pulse import watching
from trainer.rundir import RunDirectory
from trainer.runtime import Runtime
from trainer.stop import Stopping, ignore_signals


@contextmanager
def saved_when_stopped(run: RunDirectory, runtime: Runtime, save: Callable[[], None]) -> Iterator[None]:
    """Where the ranks agree to stop, save, say so, and leave together (rule 9). `save` returns when all is durable.

    Raises:
        Requeue: on all ranks.
    """
    try:
        yield
    except Stopping:
        told: list[Any] = [None] * runtime.world_size
        dist.all_gather_object(told, runtime.stop.reason)
        causes: dict[str, list[int]] = {}
        for rank, cause in enumerate(told):
            if cause is not None:
                causes.setdefault(cause, []).append(rank)
        if runtime.is_main:
            for cause, ranks in causes.items():
                run.events.record("signal" if cause.startswith("SIG") else "limit", name=cause, ranks=ranks)
        save()
        dist.barrier()  # rank 0 has committed it
        ignore_signals()
        message = _message(causes, run, runtime)
        if runtime.is_main:
            step = max(run.committed(), default=0)
            run.events.record("stop", step=step, reason=", ".join(causes))
            write_outcome(run, "requeue", message)
        dist.barrier()  # the first that is gone makes a launcher end the others
        raise Requeue(message) from None


def _message(causes: dict[str, list[int]], run: RunDirectory, runtime: Runtime) -> str:
    step = max(run.committed(), default=None)
    where = f"saved at step {step}" if step is not None else "no step was made yet"
    if causes.keys() == {"SIGINT"}:
        return f"interrupted: {where}; the same command goes on"
    by = ", ".join(
        cause if len(ranks) == runtime.world_size or not cause.startswith("SIG") else f"{cause} to rank {ranks[0]}"
        for cause, ranks in causes.items()
    )
    return f"stopped by {by}: {where}; the same command goes on"


def watched(
    run: RunDirectory, runtime: Runtime, minutes: float | None, say: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Keep a watch over all ranks; see `trainer.pulse.watching`. What hangs is also told to the run's directory."""

    def tell(message: str, step: int) -> None:
        run.events.record("hang", step=step, message=message)
        write_outcome(run, "hang", message)
        say(message)

    return watching(runtime.pulse, runtime.rank, runtime.world_size, minutes, run.logs / "hangs", tell)
