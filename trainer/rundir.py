"""The run directory: which config it belongs to, its committed checkpoints, its metrics. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import read_tree
from common.errors import UserError
from common.files import atomic_write, locked, read_json_lines
from trainer.config import TrainingConfig, as_this_version_writes, differences
from trainer.events import EventLog

# Keys, and sections with a dot at the end, that may change between two starts of one run: they change no number beyond
# rounding, or only how far the run goes.
_FREE = (
    "run.dir",
    "model.init_from",
    "data.cache_dir",
    "train.steps",
    "train.micro_batch_size",
    "train.activation_checkpointing",
    "train.activation_checkpointing_every",
    "train.compile",
    "train.deterministic",
    "train.max_skipped_steps",
    "train.max_hours",
    "train.hang_minutes",
    "train.sample_prompt",
    "parallel.",
    "checkpoint.",
    "eval.",
    "log.",
    "launch.",
)
COMMIT = "COMMIT"


class InUse(UserError):
    """Another start of the run is going on."""


@dataclass(frozen=True)
class RunDirectory:
    """`<run.dir>/<run.name>/`."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The resolved config of the newest start."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a logged step or evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> EventLog:
        """What happened to the run: starts, resumes, saves, stops and faults."""
        return EventLog(self.path / "events.jsonl")

    @property
    def outcome_file(self) -> Path:
        """What the last start came to; absent while one goes on."""
        return self.path / "outcome.json"

    @property
    def lock_file(self) -> Path:
        """Held by the start that is going on."""
        return self.path / ".lock"

    @property
    def logs(self) -> Path:
        """Output of ranks above 0, and stacks of ranks that hung."""
        return self.path / "logs"

    @property
    def sample_file(self) -> Path:
        """The text that the finished model wrote."""
        return self.path / "sample.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of all checkpoints."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Folder of one step's checkpoint."""
        return self.checkpoints / f"step_{step:08d}"

    def saved(self) -> dict[int, Path]:
        """Folders of checkpoints by step, oldest first, committed or not. Other names are none of ours."""
        numbers = [p.name.removeprefix("step_") for p in self.checkpoints.glob("step_*")]
        steps = sorted(int(number) for number in numbers if number.isdecimal())
        return {step: folder for step in steps if (folder := self.checkpoint(step)).is_dir()}

    def committed(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first. What has no COMMIT file does not exist."""
        return [step for step, folder in self.saved().items() if (folder / COMMIT).exists()]

    def damaged(self) -> list[Path]:
        """Checkpoints that were found damaged at a start, and put aside."""
        return sorted(self.checkpoints.glob("step_*.damaged*"))

    def put_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that no start takes it again; nothing of it is lost."""
        folder = self.checkpoint(step)
        names = (folder.with_name(f"{folder.name}.damaged{again}") for again in ("", *(f"-{n}" for n in range(2, 100))))
        return folder.rename(next(name for name in names if not name.exists()))

    def check_config(self, config: TrainingConfig) -> None:
        """Refuse a directory that belongs to a run with other numbers.

        Raises:
            UserError: names the first key that differs, both values, and the ways on.
        """
        if not self.config_file.exists():
            return
        ours, theirs = config.tree(), as_this_version_writes(TrainingConfig, read_tree(self.config_file))
        changed = [key for key in differences(ours, theirs) if not is_free(key)]
        if changed:
            key = changed[0]
            more = f" (and {len(changed) - 1} more keys)" if len(changed) > 1 else ""
            raise UserError(
                f"{self.path} holds another run: its '{key}' is {lookup(theirs, key)}, not {lookup(ours, key)}"
                f"{more}; "
                f"give this run a name of its own with run.name=..., or remove the folder"
            )
        if config.checkpoint.resume == "never" and self.committed():
            raise UserError(
                f"{self.path} has checkpoints and checkpoint.resume is never; "
                f"choose another run.name, or checkpoint.resume=auto to continue"
            )

    def check_writable(self) -> None:
        """Refuse a place where the run cannot be written; nothing is made yet."""
        place = self.path
        while not place.exists() and not place.is_symlink() and place != place.parent:
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            what = "a folder you may write to" if place.is_dir() else "a folder"
            raise UserError(f"'run.dir': cannot write {self.path}, because {place} is not {what}; set run.dir=...")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other starts of the run out of the directory for as long as this one goes on.

        Raises:
            InUse: another start is going on.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.lock_file, wait=False))
            except BlockingIOError:
                raise InUse(
                    f"{self.path} is in use by another start of this run; wait for it, or choose another run.name"
                ) from None
            yield

    def write_config(self, config: TrainingConfig) -> None:
        """Write the resolved config."""
        atomic_write(self.config_file, config.yaml())

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl; a last line that a crash cut short is left out."""
        return read_json_lines(self.metrics_file)

    def truncate_metrics(self, step: int) -> None:
        """Drop rows past `step`: a resumed run logs those steps again."""
        if self.metrics_file.exists():
            rows = [row for row in self.read_metrics() if row["step"] <= step]
            atomic_write(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))


def run_directory(config: TrainingConfig) -> RunDirectory:
    """The directory of a config's run."""
    return RunDirectory(config.run.folder)


def find_checkpoint(path: Path) -> Path:
    """A committed checkpoint: `path` itself, or the newest one of the run directory `path`.

    Raises:
        UserError: nothing committed there.
    """
    if (path / COMMIT).exists():
        return path
    run = RunDirectory(path)
    if steps := run.committed():
        return run.checkpoint(steps[-1])
    if not path.exists():
        raise UserError(f"{path}: no such run or checkpoint")
    raise UserError(f"{path} holds no committed checkpoint (no {COMMIT} file); train first, or name another folder")


def is_free(key: str) -> bool:
    """Whether two starts of one run may differ in a key."""
    return any(key == free or (free.endswith(".") and key.startswith(free)) for free in _FREE)


def lookup(tree: dict[str, Any], key: str) -> Any:
    """The value of a dotted key in a config tree, as JSON."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return json.dumps(value)
