"""Inside an allocation: which task of a step this process is, and where its tasks meet."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import NamedTuple

from common.errors import UserError
from common.nodes import Nodes, shown_address, split_address
from launch import python_path
from launch.network import address_towards, choose_interface
from launch.slurm.control import SlurmError, host_names, show_node

RDZV = "GRAMIAN_RDZV"  # HOST:PORT, as the job's script has found it
# Below the ports that systems give out by themselves (32768 and above on Linux), above the well-known ones.
_FIRST_PORT, _PORTS = 20_000, 12_000


class Step(NamedTuple):
    """A step of several tasks, and this one's place in it."""

    tasks: int
    nodes: int
    rank: int
    node: int
    local_rank: int
    on_a_node: int | None  # tasks of each node; None: not the same on all

    @property
    def starts_workers(self) -> bool:
        """Whether a task is a launcher, one a node, rather than a rank."""
        return self.on_a_node == 1

    def launchers(self, environment: Mapping[str, str]) -> Nodes:
        """The tasks as launchers."""
        host, port = meeting_point(environment)
        return Nodes(self.nodes, self.node, host, port, option=f"the step of {self.nodes} nodes")

    def become_rank(self, environment: Mapping[str, str]) -> None:
        """Set the variables that a worker reads, as torchrun would."""
        host, port = meeting_point(environment)
        variables = {"RANK": self.rank, "WORLD_SIZE": self.tasks, "LOCAL_RANK": self.local_rank}
        if self.on_a_node is not None:
            variables["LOCAL_WORLD_SIZE"] = self.on_a_node
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible and "," not in visible:  # --gpus-per-task=1: each task sees its own, and numbers it 0
            os.environ["LOCAL_RANK"] = "0"
        os.environ.setdefault("OMP_NUM_THREADS", environment.get("SLURM_CPUS_PER_TASK", "1"))
        choose_interface(host)


def read_step(environment: Mapping[str, str]) -> Step | None:
    """The step that this process is a task of; None: there is none, or it has this task alone."""
    if "SLURM_STEP_ID" not in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return None
    per_node = re.findall(r"(\d+)(?:\(x\d+\))?", environment["SLURM_STEP_TASKS_PER_NODE"])
    return Step(
        int(environment["SLURM_STEP_NUM_TASKS"]),
        int(environment["SLURM_STEP_NUM_NODES"]),
        int(environment["SLURM_PROCID"]),
        int(environment["SLURM_NODEID"]),
        int(environment["SLURM_LOCALID"]),
        int(per_node[0]) if len(set(per_node)) == 1 else None,
    )


def step_to_start(
    environment: Mapping[str, str], nproc: int | None, command: str, words: list[str]
) -> list[str] | None:
    """In an allocation of several nodes, but in no step of it: what starts a launcher on each; else None."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_JOB_ID" not in environment or nodes == "1" or environment.get("SLURM_STEP_ID", "").isdecimal():
        return None
    os.environ["PYTHONPATH"] = python_path()
    many = ["--nproc", str(nproc)] if nproc is not None else []
    tasks = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
    return ["srun", *tasks, sys.executable, "-P", "-m", "gramian", command, *many, *words]


def meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """Host and port where rank 0 listens: what `GRAMIAN_RDZV` says, or the first node and a port of this step's own.

    Raises:
        UserError: the first node's name leads nowhere.
    """
    if given := environment.get(RDZV):
        return split_address(RDZV, given)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    step = environment.get("SLURM_STEP_ID", "")
    return address_of(host_names(nodes)[0]), candidate_ports(
        int(environment["SLURM_JOB_ID"]), int(step) if step.isdecimal() else 0
    )[0]


def candidate_ports(job: int, step: int = 0) -> list[int]:
    """Ports of a step in the order in which they are tried: those of jobs near one another are apart."""
    first = (job * 10 + step) % _PORTS
    return [_FIRST_PORT + (first + again * 997) % _PORTS for again in range(20)]


def free_port(job: int) -> int:
    """The first of a job's ports that nobody here listens on."""
    for port in candidate_ports(job):
        with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UserError(
        f"ports {candidate_ports(job)[0]} and 19 others of job {job} are taken on {socket.gethostname()}; set {RDZV}="
        f"HOST:PORT in `env` of the cluster file"
    )


def address_of(node: str) -> str:
    """A numeric address of a node: by the address that SLURM itself uses for it, or by its names."""
    record: dict[str, str] = {}
    with contextlib.suppress(SlurmError):
        record = show_node(node)
    names = dict.fromkeys(filter(None, [record.get("NodeAddr"), record.get("NodeHostName"), node]))
    for name in names:
        try:
            found = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            continue
        # The loopback that a host gives as its own address, as Debian does, leads nowhere from the others.
        if not found.startswith("127.") or name == record.get("NodeAddr"):
            return found
    if node in (os.environ.get("SLURMD_NODENAME"), socket.gethostname()) and (own := address_towards("192.0.2.1")):
        return own
    raise UserError(
        f"the first node cannot be reached by name: none of {', '.join(names)} resolves; give its address as {RDZV}="
        f"HOST:PORT in `env` of the cluster file, or have the name put into DNS"
    )


def shown_meeting_point(environment: Mapping[str, str], job: int) -> str:
    """HOST:PORT for a job, with a port that is free on this machine, its first node."""
    if given := environment.get(RDZV):
        return given
    return shown_address(address_of(host_names(environment["SLURM_JOB_NODELIST"])[0]), free_port(job))


if __name__ == "__main__":  # for scripts of one's own: where the nodes of this job can meet
    try:
        print(shown_meeting_point(os.environ, int(os.environ["SLURM_JOB_ID"])))
    except UserError as error:
        print(f"gramian: {error}", file=sys.stderr)
        sys.exit(2)
