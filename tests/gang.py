"""A gang of ranks that lives for the whole test session: a distributed test does not pay for starting processes.

`gang.run(function, *arguments, world=4)` calls `function(*arguments)` on that many ranks at once, with torchrun's
environment variables set, and returns what each returned. It is given a time: ranks that have not answered by then are
killed, a new gang takes their place, and the test fails: a deadlock is a failure and not a wait.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

SIZE = 4


class GangError(AssertionError):
    """One or more ranks failed or did not answer; carries each rank's traceback."""


class Gang:
    """Waiting processes; made on first use."""

    def __init__(self, environment: dict[str, str | None] | None = None, size: int = SIZE) -> None:
        """`environment` is laid over the ranks' environment before they import torch; None takes a variable away."""
        self._environment, self._size = environment or {}, size
        self._context = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *arguments: Any, world: int, timeout: float = 120.0) -> list[Any]:
        """Call an importable function on ranks 0 to `world` - 1; return their results by rank."""
        if not self._members:
            self._start()
        port = _free_port()
        members = self._members[:world]
        for rank, (_, connection) in enumerate(members):
            connection.send((function, arguments, rank, world, port))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = monotonic() + timeout
        waiting = {connection: rank for rank, (_, connection) in enumerate(members)}
        # After the first failure the others may wait for the dead rank for ever: they get a few seconds.
        while waiting and (left := deadline - monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left):
                rank = waiting.pop(connection)  # type: ignore[index, arg-type]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, "the process died")
                if not answers[rank][0]:
                    deadline = min(deadline, monotonic() + 5)
        failures = [f"rank {r}: {value}" for r, (fine, value) in sorted(answers.items()) if not fine]
        if waiting:
            failures.append(f"ranks {sorted(waiting.values())} gave no answer in time")
            self.stop()
        if failures:
            raise GangError("\n".join(failures))
        return [answers[rank][1] for rank in range(world)]

    def _start(self) -> None:
        for _ in range(self._size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._environment), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def stop(self) -> None:
        """End the processes of this gang."""
        for process, connection in self._members:
            connection.close()
            process.kill()
            process.join()
        self._members = []


def _serve(connection: Connection, environment: dict[str, str | None]) -> None:
    """Life of a rank: take a call, answer, until the session closes the pipe."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name, value in environment.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    import torch
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, rank, world, port = connection.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            # It remembers meshes, and would take one of this call, with its dead groups, for an equal one of the next.
            _clear_sharding_prop_cache()
        connection.send(answer)


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
