"""What SLURM's own commands are asked, and how their answers are read."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator

from common.errors import UserError


class SlurmError(Exception):
    """A command of SLURM's that refused: its own line."""


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """For commands of the user's: what SLURM refuses is one line."""
    try:
        yield
    except SlurmError as error:
        raise UserError(f"SLURM does not answer: {error}; see whether slurmctld runs, or wait") from None


def slurm(*words: str) -> str:
    """Standard output of a command of SLURM's.

    Raises:
        UserError: the machine has no such command.
        SlurmError: it refused, or did not answer in a minute.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise UserError(
            f"there is no SLURM on this machine ({words[0]} is not on the PATH); go to a login node of the cluster, or "
            f"train here with `gramian train`"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} gave no answer in 60 s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise SlurmError(re.sub(r"^\w+: (error: )*", "", lines[0]))
    return done.stdout


def read_jobs(text: str) -> list[dict[str, str]]:
    """The records of `scontrol show job -o` or `show node -o`; values that have spaces are cut at the first."""
    return [dict(re.findall(r"(?:^| )([A-Za-z:/]+)=(\S*)", line)) for line in text.splitlines() if line.strip()]


def show_jobs(job: str) -> list[dict[str, str]]:
    """Records of a job, one for each element of an array that has begun and one for those that wait; none if it is
    forgotten, some minutes after its end."""
    try:
        return read_jobs(slurm("scontrol", "show", "job", "-o", job))
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return []
        raise


def time_of(record: dict[str, str], field: str) -> float:
    """A time in a record, in seconds since 1970.

    Raises:
        ValueError: it is not known, or there is none.
    """
    return time.mktime(time.strptime(record.get(field, ""), "%Y-%m-%dT%H:%M:%S"))


def show_node(name: str) -> dict[str, str]:
    """Record of a node."""
    return next(iter(read_jobs(slurm("scontrol", "show", "node", "-o", name))), {})


def host_names(nodes: str) -> list[str]:
    """The names in a list like n[0-3,7]."""
    return slurm("scontrol", "show", "hostnames", nodes).split()
