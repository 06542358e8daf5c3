"""A real SLURM on one machine: slurmctld, and a slurmd for each of several nodes, ended by their ids."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch.slurm.control import read_jobs
from tests.gang import _free_port
from tests.launch.commands import BIN, environment

_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
SlurmdTimeout=10
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=main Nodes=ALL PriorityTier=1 GraceTime=30 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 State=UNKNOWN"


def missing() -> str | None:
    """Why there can be no cluster here; None: there can."""
    absent = [name for name in ("slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm"
    return None if os.geteuid() == 0 else "slurmd starts other users' jobs, and needs root"


class Cluster:
    """A cluster of nodes n0, n1, ...; node names do not resolve, as on clusters whose names are not in DNS."""

    def __init__(self, root: Path, nodes: int) -> None:
        self._root, self._processes = root, {}  # type: ignore[var-annotated]
        host = socket.gethostname().partition(".")[0]
        self.names = [f"n{number}" for number in range(nodes)]
        (root / "state").mkdir(parents=True)
        lines = []
        for name in self.names:
            (root / f"spool.{name}").mkdir()
            lines.append(_NODE.format(name=name, host=host, port=_free_port()))
        self.conf = root / "slurm.conf"
        self.conf.write_text(_CONF.format(host=host, port=_free_port(), root=root, nodes="\n".join(lines)))

    def start(self) -> None:
        """Start all, and wait until every node is idle."""
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        for name in self.names:
            self.start_node(name)
        self.until(lambda: self._idle() == set(self.names), 60)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd."""
        self._start(name, "slurmd", "-D", "-f", str(self.conf), "-N", name)

    def kill_node(self, name: str) -> None:
        """A node loses power: its slurmd and all that runs on it are killed at once."""
        daemon = self._processes.pop(name)
        tasks = self.processes(SLURMD_NODENAME=name)
        listed = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True).stdout.splitlines()
        daemon.kill()
        daemon.wait()
        # A node's slurmstepds know its spool folder; the jobs of theirs know the node.
        named = [int(line.split()[0]) for line in listed if re.search(r"slurmstepd: \[", line)]
        for pid in {*tasks, *(pid for pid in named if self._has_open(pid, f"spool.{name}"))}:
            _kill(pid)

    def _has_open(self, pid: int, word: str) -> bool:
        try:
            return any(word in os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            return False

    def stop(self) -> None:
        """Cancel all jobs, end all daemons and whatever jobs have left."""
        try:
            self.run("scancel", "--user=root")
            self.until(lambda: not self.run("squeue", "-h"), 30)
        finally:
            for name in [*self.names, "slurmctld"]:
                if (process := self._processes.get(name)) is not None and process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            for process in self._processes.values():
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            for pid in self.processes():
                _kill(pid)

    def _start(self, name: str, *words: str) -> None:
        with open(self._root / f"{name}.out", "ab") as output:
            self._processes[name] = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)

    @property
    def variables(self) -> dict[str, str]:
        """What lets SLURM's commands find this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    def run(self, *words: str, **variables: str) -> str:
        """Output of a command that must succeed; the project's own are found too."""
        program = str(BIN / words[0]) if (BIN / words[0]).exists() else words[0]
        done = subprocess.run(
            [program, *words[1:]],
            env=environment(**self.variables, **variables),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def submit(self, *words: str | Path, **variables: str) -> str:
        """`gramian slurm submit`; the job's number."""
        (job,) = re.findall(
            r"^job    (\d+)$", self.run("gramian", "slurm", "submit", *map(str, words), **variables), re.M
        )
        return job

    def file(self, path: Path, exclude: str, **settings: Any) -> Path:
        """A cluster file that keeps a job to some nodes."""
        path.write_text(json.dumps({"sbatch": [f"--exclude={exclude}"], "signal_seconds": 30, **settings}))
        return path

    def record(self, job: str) -> dict[str, str]:
        """What SLURM says of a job."""
        return read_jobs(self.run("scontrol", "show", "job", "-o", job))[0]

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, ..."""
        return self.record(job)["JobState"]

    def _idle(self) -> set[str]:
        try:
            return set(self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split())
        except AssertionError:  # it does not answer yet
            return set()

    @staticmethod
    def until(condition: Callable[[], Any], seconds: float = 120, told: Callable[[], str] = str) -> Any:
        """Wait for something to be so."""
        deadline = time.monotonic() + seconds
        while not (result := condition()):
            assert time.monotonic() < deadline, told()
            time.sleep(0.05)
        return result

    def processes(self, **variables: str) -> list[int]:
        """Processes that jobs of this cluster have started, with these variables."""
        return [pid for pid in _pids() if _has(pid, {**self.variables, **variables})]


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _has(pid: int, variables: Mapping[str, str]) -> bool:
    """Whether a process that a job started, and that is no zombie, has these variables."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"SLURM_JOB_ID=" in b"\0".join(entries) and all(f"{k}={v}".encode() in entries for k, v in variables.items())


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
