"""Loading checkpoints: every byte is checked first, and every tensor is accounted for. Nothing is unpickled."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from common.errors import UserError
from trainer.engines.base import Engine
from trainer.manifest import damage, refuse_damaged
from trainer.runtime import Runtime


def damage_seen_by_all(folder: Path, runtime: Runtime) -> dict[str, str]:
    """What is damaged of a checkpoint. Ranks share the reading, and all get the same answer."""
    found: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(found, damage(folder, runtime.rank, runtime.world_size))
    return {name: what for part in found for name, what in part.items()}


def load_engine(
    folder: Path, engine: Engine, runtime: Runtime, weights_only: bool = False, checked: bool = False
) -> None:
    """Load weights and optimizer state into an engine, whatever layout wrote them.

    Args:
        folder: a committed checkpoint.
        engine: to load into.
        runtime: this rank.
        weights_only: leave the optimizer's state as it is; the checkpoint need not have any.
        checked: its files were found whole just now.

    Raises:
        UserError: a damaged file, or tensors that are not those of the engine.
    """
    if not checked:
        refuse_damaged(folder, damage_seen_by_all(folder, runtime))
    state = engine.state_dict()
    if weights_only:
        state = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
    names: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(names, list(state))  # an optimizer of matrices keeps a matrix' state on one rank
    _load(folder, state, no_dist=False, partial=weights_only, elsewhere={name for those in names for name in those})
    engine.load_state_dict(state)


def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """Load a checkpoint's weights into a plain model in this process, without a process group."""
    refuse_damaged(folder, damage(folder))
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
