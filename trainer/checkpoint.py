"""Saving checkpoints that are whole or do not exist (rule 8); trainer/load.py reads them.

A checkpoint is a folder `step_00000100/`:

    shard-*.safetensors   weights and optimizer state, logical tensors by name, in the safetensors format as torch DCP
                          reads it: by any number of ranks and any engine; no pickle is written or read
    tokenizer.model       so that the checkpoint generates text wherever it is taken
    trainer.json          format version, step, config, hashes of data and tokenizer, state of fp16's loss scaler
    manifest.json         size and hash of every file above
    COMMIT                the manifest's hash; written last, when every rank's bytes are durable
"""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UserError
from common.files import atomic_write
from common.logs import get_logger
from trainer.config import CheckpointConfig
from trainer.engines.base import Engine
from trainer.manifest import FORMAT_VERSION, STATE, TOKENIZER, commit, fingerprint
from trainer.retention import prune
from trainer.rundir import RunDirectory
from trainer.runtime import Runtime
from trainer.shard import Shard

# A save that needs ranks which are gone does not end; one that does not need them has this long to be committed.
_GRACE_SECONDS = 20.0
# What a checkpoint takes beside its tensors: manifest, trainer.json, what a file system rounds up.
_ROOM_BESIDE = 1 << 19
# What the user can mend.
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)

T = TypeVar("T")


class Failure(NamedTuple):
    """Why a save failed, as all ranks are told."""

    cause: str
    refused: bool  # the file system would not; no fault of the program


class Checkpointer:
    """Saves an engine's state into a run directory, in the background if asked, one save at a time.

    Every rank calls the same methods at the same steps. What the ranks say to one another in the background goes over a
    group of its own, so that it does not mix with the training's.
    """

    def __init__(self, run: RunDirectory, runtime: Runtime, config: CheckpointConfig) -> None:
        self._run = run
        self._runtime = runtime
        self._config = config
        self._group = dist.new_group(backend="gloo")
        self._shard: Shard | None = None
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        self._failures: list[Failure] = []  # since the last save that did not fail; the same on every rank
        self._step: int | None = None  # of the newest save that was begun
        self._began = time.monotonic()
        # Of rank 0: seconds of the longest save of the run, other starts' included.
        self.longest = max(run.events.seconds_of("save"), default=0.0) if runtime.is_main else 0.0

    def due(self, step: int) -> bool:
        """Whether to save after this step. Of the minutes rank 0's clock decides for all."""
        every, minutes = self._config.every, self._config.every_minutes
        if (every is not None and step % every == 0) or self._is_permanent(step):
            return True
        if minutes is None:
            return False
        passed = torch.tensor(int(time.monotonic() - self._began >= 60 * minutes))
        dist.broadcast(passed, src=0)
        return bool(passed)

    def save(self, engine: Engine, trainer_state: dict[str, Any], tokenizer: Path, last: bool = False) -> None:
        """Save at `trainer_state["step"]`. Returns when the state is copied, and commits when it is durable.

        Args:
            engine: whose state is saved.
            trainer_state: the plain data that goes with it.
            tokenizer: file to put beside it.
            last: nothing is saved after it, so that it is not left out for a save that is still running.

        Raises:
            UserError, RuntimeError: as `wait` does, when `max_failures` saves in a row have failed.
        """
        step, begin = trainer_state["step"], time.perf_counter()
        self._began = time.monotonic()
        if self._config.when_busy == "skip" and not last and not self._is_permanent(step) and self._is_busy():
            if self._runtime.is_main:
                get_logger().warning("step %d is not saved: the save of step %d is still running", step, self._step)
                self._run.events.record("save_skipped", step=step, running=self._step)
            return
        self._settle()
        if step == self._step and not self._failures:
            return  # a stop right after a save asks for the same again
        state = engine.state_dict()
        if self._shard is None:
            self._shard = Shard(state, self._group)
            self._room = self._sum(self._shard.bytes)
        shard = self._shard
        parts = shard.stage(state, engine.optimizer) if self._config.async_ else shard.live(state)
        stall = time.perf_counter() - begin
        self._step = step
        arguments = (shard, parts, trainer_state, tokenizer, stall)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        if not self._config.async_:
            self._settle()

    def wait(self) -> None:
        """Wait until the running save, if any, is committed.

        Raises:
            UserError: the newest save failed because the file system refused, for example for want of room.
            RuntimeError: it failed over anything else, on this rank or another.
        """
        self._settle(allowed=0)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Let a running save finish: for as long as it takes, or, where an error ends the run, for a while."""
        if error is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join(timeout=_GRACE_SECONDS)

    def _is_permanent(self, step: int) -> bool:
        return self._config.keep_every > 0 and step % self._config.keep_every == 0

    def _is_busy(self) -> bool:
        """Whether any rank is still at the save before."""
        running = torch.tensor(int(self._thread is not None and self._thread.is_alive()))
        dist.all_reduce(running, dist.ReduceOp.MAX)
        return bool(running)

    def _sum(self, value: int) -> int:
        total = torch.tensor(value)
        dist.all_reduce(total, group=self._group)
        return int(total)

    def _settle(self, allowed: int | None = None) -> None:
        """Wait for the running save; raise if more saves in a row have failed than are `allowed`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            raise RuntimeError(f"saving a checkpoint failed: {self._fault}") from self._fault
        if len(self._failures) > (self._config.max_failures - 1 if allowed is None else allowed):
            cause, refused = self._failures[-1]
            if refused:
                raise UserError(
                    f"cannot save in {self._run.checkpoints}: {cause}; make room or mend permissions, "
                    f"then start again: the run goes on from its newest committed checkpoint"
                )
            raise RuntimeError(f"saving a checkpoint failed: {cause}")

    def _write(
        self, shard: Shard, parts: list[list[Tensor]], trainer_state: dict[str, Any], tokenizer: Path, stall: float
    ) -> None:
        """In the background: write, commit, tell. Whatever goes wrong on a rank, all hear of it and none waits."""
        try:
            step, begin = trainer_state["step"], time.perf_counter()
            folder = self._run.checkpoint(step)
            failure = self._agree(lambda: self._make(folder, tokenizer))
            if failure is None:
                mine, trouble = _attempt(lambda: shard.write(folder, parts))
                gathered: list[Any] = [None] * self._runtime.world_size
                dist.gather_object((mine, trouble), gathered if self._runtime.is_main else None, group=self._group)
                failure = self._agree(lambda: self._commit(folder, gathered, trainer_state, tokenizer))
            self._failures = [] if failure is None else [*self._failures, failure]
            if self._runtime.is_main:
                seconds = time.perf_counter() - begin
                _attempt(lambda: self._tell(folder, step, failure, seconds, stall))  # which is worth no run
        except BaseException as error:  # ranks could not speak, so that they may not agree
            self._fault = error

    def _agree(self, act: Callable[[], Failure | None]) -> Failure | None:
        """Let rank 0 do something for all; every rank gets what failed, if anything did."""
        result: list[Any] = [None]
        if self._runtime.is_main:
            failed, trouble = _attempt(act)
            result = [trouble or failed]
        dist.broadcast_object_list(result, src=0, group=self._group)
        failure: Failure | None = result[0]
        return failure

    def _make(self, folder: Path, tokenizer: Path) -> Failure | None:
        """The folder, if there is room for what is to be in it."""
        if folder.exists():  # the torn remains of a save that a crash ended
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        needed = self._room + tokenizer.stat().st_size + _ROOM_BESIDE
        if (free := shutil.disk_usage(folder).free) < needed:
            return Failure(f"No space left on device: it takes {needed:,} bytes and {free:,} are free", refused=True)
        return None

    def _commit(
        self, folder: Path, gathered: list[Any], trainer_state: dict[str, Any], tokenizer: Path
    ) -> Failure | None:
        """On rank 0: write the other files, the manifest of all and then COMMIT."""
        files: dict[str, Any] = {}
        for rank, (entries, trouble) in enumerate(gathered):
            if trouble is not None:
                return Failure(f"{trouble.cause} (rank {rank})", trouble.refused)
            files |= entries
        if unseen := [name for name in files if not (folder / name).is_file()]:
            return Failure(
                f"{unseen[0]} was written by another rank and is not to be seen by rank 0 (run.dir must lie on a file "
                f"system that all ranks share)",
                refused=True,
            )
        atomic_write(folder / STATE, json.dumps({"format": FORMAT_VERSION, **trainer_state}, indent=1))
        atomic_write(folder / TOKENIZER, tokenizer.read_bytes())
        commit(folder, files | {name: fingerprint(folder / name) for name in (STATE, TOKENIZER)})
        return None

    def _tell(self, folder: Path, step: int, failure: Failure | None, seconds: float, stall: float) -> None:
        """On rank 0: say how a save ended, and take away what is of no use any more."""
        events = self._run.events
        if failure is None:
            took = {"seconds": round(seconds, 3), "stall_seconds": round(stall, 3)}
            events.record("save", step=step, bytes=self._room, **took)
            self.longest = max(self.longest, seconds)
            _, trouble = _attempt(lambda: prune(self._run, self._config.keep, self._config.keep_every))
            if trouble is not None:
                get_logger().warning("old checkpoints cannot be removed: %s", trouble.cause)
            return
        shutil.rmtree(folder, ignore_errors=True)
        failed, allowed = len(self._failures), self._config.max_failures
        events.record("save_failed", step=step, cause=failure.cause, in_a_row=failed, max_failures=allowed)
        newest = f"step {committed[-1]}" if (committed := self._run.committed()) else "none"
        get_logger().warning(
            "step %d is NOT SAVED: %s; newest checkpoint: %s; failed in a row: %d, and the run ends at %d (%s)",
            *(step, failure.cause, newest, failed, allowed, "checkpoint.max_failures"),
        )


def _attempt(act: Callable[[], T]) -> tuple[T | None, Failure | None]:
    try:
        return act(), None
    except OSError as error:
        return None, Failure(error.strerror or str(error), error.errno in _REFUSALS)
    except Exception as error:
        return None, Failure(f"{type(error).__name__}: {error}", refused=False)
