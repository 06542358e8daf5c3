"""Where a run's numbers came from, written at every start."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.checkout import commit_and_diff
from common.errors import UserError
from common.files import atomic_write, hash_json, next_numbered
from common.ranks import attempt
from trainer.config import TrainingConfig
from trainer.layout import Layout
from trainer.rundata import RunData
from trainer.rundir import RunDirectory
from trainer.runtime import Runtime

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("gramian", "torch", "numpy", "pydantic", "safetensors", "sentencepiece")


def check_shared(run: RunDirectory, runtime: Runtime) -> None:
    """Refuse a run directory that is not the same folder for all ranks: each would save a part of a checkpoint.

    Raises:
        UserError: on all ranks, as one does not see what rank 0 has written.
    """
    mark = run.path / f".shared-{os.urandom(8).hex()}"
    if runtime.is_main:
        mark.touch()
    told: list[Any] = [mark.name]
    dist.broadcast_object_list(told)
    seen: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(seen, (socket.gethostname(), _appears(run.path / told[0])))
    if runtime.is_main:
        mark.unlink()
    blind = [host for host, sees in seen if not sees]
    if blind:
        raise UserError(
            f"{run.path} is not the same folder on {blind[0]} as on {seen[0][0]}, where rank 0 is; "
            f"set run.dir to a folder that all machines share"
        )


def _appears(path: Path) -> bool:
    """Whether a file is there; network file systems remember for some seconds that it was not."""
    deadline = time.monotonic() + (10.0 if path.parent.is_dir() else 2.0)
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # looks anew
        time.sleep(0.2)
    return True


def record_start(
    run: RunDirectory, runtime: Runtime, config: TrainingConfig, layout: Layout, step: int, data: RunData
) -> None:
    """Write `starts/<n>/`: resolved config, command, git commit and diff, versions, hosts, layout, hashes of the data.

    All ranks call it: the hosts are gathered.

    Raises:
        UserError: ranks with another corpus, tokenizer or config than the rest.
    """
    ranks: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(ranks, (socket.gethostname(), data.data_hash, hash_json(config.tree())))
    for what, values in (("corpus or tokenizer", {r[1] for r in ranks}), ("config", {r[2] for r in ranks})):
        if len(values) > 1:
            raise UserError(
                f"ranks do not have the same {what}; give all of {', '.join(sorted({r[0] for r in ranks}))} the same "
                f"files and the same Python"
            )
    hosts = [rank[0] for rank in ranks]
    if not runtime.is_main:
        return
    counts = {host: hosts.count(host) for host in sorted(set(hosts))}
    run.events.record("start", attempt=attempt(), ranks=runtime.world_size, hosts=counts, step=step)
    folder = next_numbered(run.path / "starts")
    commit, diff = commit_and_diff(_ROOT)
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        # Our launcher hands down what the user typed; any other starts workers with what it was told.
        "command": os.environ.get("GRAMIAN_COMMAND") or shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "from_step": step,
        "git_commit": commit,
        "git_dirty": bool(diff),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "hosts": counts,
        "device": str(runtime.device),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "world_size": runtime.world_size,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard,
        "tokenizer_hash": data.tokenizer_hash,
        "data_hash": data.data_hash,
        "data_folder": str(data.folder),
    }
    atomic_write(folder / "config.yaml", config.yaml())
    if diff:
        atomic_write(folder / "code.diff", diff)
    atomic_write(folder / "provenance.json", json.dumps(record, indent=1))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
