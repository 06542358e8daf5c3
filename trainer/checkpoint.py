"""Checkpoints that are whole or do not exist (rule 8).

A checkpoint is a folder `step_00000100/`:

    shard-*.safetensors   weights and optimizer state, logical tensors by name, written by torch DCP in the safetensors
                          format: any number of ranks and either engine reads them; no pickle is written or read
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
import warnings
from collections.abc import Mapping, Set
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from common.errors import UserError
from common.files import atomic_write
from trainer.engines.base import Engine
from trainer.manifest import FORMAT_VERSION, STATE, TOKENIZER, commit, damaged_files, fingerprint, refuse_damaged
from trainer.rundir import RunDirectory
from trainer.runtime import Runtime

# A save that needs ranks which are gone does not end; one that does not need them has this long to be committed.
_GRACE_SECONDS = 20.0


class Checkpointer:
    """Saves an engine's state into a run directory, in the background if asked, one save at a time."""

    def __init__(self, run: RunDirectory, runtime: Runtime, keep: int, asynchronous: bool) -> None:
        self._run = run
        self._runtime = runtime
        self._keep = keep
        self._asynchronous = asynchronous
        # A group of its own: the background save must not mix its messages with the training's.
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, engine: Engine, trainer_state: dict[str, Any], tokenizer: Path) -> None:
        """Save at `trainer_state["step"]`. Returns when the state is copied, and commits when it is durable."""
        self.wait()
        folder = self._run.checkpoint(trainer_state["step"])
        if self._runtime.is_main:
            if folder.exists():  # the torn remains of a save that a crash ended
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        dist.barrier(group=self._group)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        state = engine.state_dict()
        written: Future[Any] | None = None
        if self._asynchronous:
            # Copies the state now, and writes the copy in a thread of its own.
            written = cast(Future[Any], dcp.async_save(state, storage_writer=writer, process_group=self._group))

        def finish() -> None:
            try:
                if written is not None:
                    written.result()
                else:
                    dcp.save(state, storage_writer=writer, process_group=self._group)
                self._commit(folder, trainer_state, tokenizer)
            except BaseException as error:  # DCP's own is no Exception
                self._error = error

        self._thread = threading.Thread(target=finish, name="checkpoint", daemon=True)
        self._thread.start()
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the running save, if any, is committed.

        Raises:
            UserError: the file system refused, for example for want of room.
            RuntimeError: anything else that went wrong in the save, on this rank or another.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            cause = _file_system_refusal(error)
            if cause is not None:
                raise UserError(
                    f"cannot save in {self._run.checkpoints}: {cause.strerror}; make room or mend permissions, "
                    f"then start again: the run goes on from its newest committed checkpoint"
                ) from error
            raise RuntimeError(f"saving a checkpoint failed: {error}") from error

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Let a running save finish: for as long as it takes, or, where an error ends the run, for a while."""
        if error is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join(timeout=_GRACE_SECONDS)

    def _commit(self, folder: Path, trainer_state: dict[str, Any], tokenizer: Path) -> None:
        """Hash what this rank wrote; rank 0 gathers the hashes, writes the manifest and then COMMIT."""
        mine = {p.name: fingerprint(p) for p in folder.glob(f"shard-{self._runtime.rank + 1:05d}-*")}
        gathered: list[Any] = [None] * self._runtime.world_size
        dist.gather_object(mine, gathered if self._runtime.is_main else None, group=self._group)
        if not self._runtime.is_main:
            return
        atomic_write(folder / STATE, json.dumps({"format": FORMAT_VERSION, **trainer_state}, indent=1))
        atomic_write(folder / TOKENIZER, tokenizer.read_bytes())
        files = {name: entry for part in gathered for name, entry in part.items()}
        if unseen := [name for name in files if not (folder / name).is_file()]:
            raise OSError(
                errno.EACCES,
                f"{unseen[0]} was written by another rank and is not to be seen by rank 0 (run.dir must lie on a file "
                f"system that all ranks share)",
            )
        files |= {name: fingerprint(folder / name) for name in (STATE, TOKENIZER)}
        commit(folder, files)
        self._run.prune(self._keep)


def _file_system_refusal(error: BaseException) -> OSError | None:
    """The want of room or of permission behind a failed save, on whatever rank DCP met it."""
    for cause in (error, *(failure[0] for failure in getattr(error, "failures", {}).values())):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            return cause
    return None


def load_engine(folder: Path, engine: Engine, runtime: Runtime, weights_only: bool = False) -> None:
    """Load weights and optimizer state into an engine, whatever layout wrote them. Ranks share the check of files.

    With `weights_only` the optimizer's state stays as it is, and the checkpoint need not have any.
    """
    damaged = damaged_files(folder, runtime.rank, runtime.world_size)
    reports: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(reports, damaged)
    refuse_damaged(folder, [name for report in reports for name in report])
    state = engine.state_dict()
    if weights_only:
        state = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
    names: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(names, list(state))  # an optimizer of matrices keeps a matrix' state on one rank
    _load(folder, state, no_dist=False, partial=weights_only, elsewhere={name for those in names for name in those})
    engine.load_state_dict(state)


def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """Load a checkpoint's weights into a plain model in this process, without a process group."""
    refuse_damaged(folder, damaged_files(folder))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}
    _load(folder, state, no_dist=True, partial=True)


def _load(
    folder: Path, state: dict[str, Tensor], no_dist: bool, partial: bool = False, elsewhere: Set[str] = frozenset()
) -> None:
    """Read tensors in place; names and shapes must agree exactly, but for what `partial` leaves out.

    `elsewhere` are the names of tensors that any rank reads.
    """
    reader = HuggingFaceStorageReader(str(folder))
    saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    missing = sorted((state.keys() | elsewhere) - saved.keys())
    unexpected = sorted(saved.keys() - state.keys() - elsewhere) if not partial else []
    reshaped = sorted(k for k in state.keys() & saved.keys() if tuple(state[k].shape) != tuple(saved[k].size))
    for names, problem in (
        (missing, "lacks"),
        (unexpected, "has, but this config has not,"),
        (reshaped, "has in another shape"),
    ):
        if names:
            what = "optimizer" if names[0].startswith("optim.") else "architecture"
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(
                f"{folder} is a checkpoint of another {what}: it {problem} '{names[0]}'{more}; "
                f"use the config that wrote it (in its trainer.json)"
            )
    with warnings.catch_warnings():
        # That one process loads is what `no_dist` asks for; torch warns of it all the same.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=no_dist)
