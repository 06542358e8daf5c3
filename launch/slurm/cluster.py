"""What holds on a cluster, whatever is trained there: `configs/cluster/*.yaml`."""

from __future__ import annotations

import difflib
import shlex
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from common.config import Config, read_tree, validate
from common.errors import UserError
from launch import ROOT

_FOLDER = ROOT / "configs" / "cluster"


class ContainerConfig(Config):
    """The container that processes run in."""

    runtime: Literal["apptainer", "pyxis"] = Field("apptainer", description="apptainer, or pyxis (with enroot).")
    image: str = Field(description="Image, as the runtime names it.")
    mounts: list[str] = Field(default_factory=list, description="FROM:TO, beside the working directory and the run's.")
    python: str = Field("python3", description="Interpreter inside.")

    def srun(self, needed: list[str]) -> list[str]:
        """Options of srun."""
        if self.runtime != "pyxis":
            return []
        return [f"--container-image={self.image}", f"--container-mounts={','.join(self._mounts(needed))}"]

    def inside(self, needed: list[str]) -> list[str]:
        """Words before the command."""
        if self.runtime != "apptainer":
            return []
        binds = [word for mount in self._mounts(needed) for word in ("--bind", mount)]
        return ["apptainer", "exec", "--nv", *binds, self.image]

    def _mounts(self, needed: list[str]) -> list[str]:
        return [*self.mounts, *(f"{folder}:{folder}" for folder in needed)]


class ClusterConfig(Config):
    """A cluster's settings. Options of `gramian slurm submit` win over them."""

    partition: str | None = Field(None, description="Partition; null: the cluster's default.")
    account: str | None = Field(None, description="Account.")
    qos: str | None = Field(None, description="Quality of service.")
    time: str | None = Field(None, description="Time limit, as sbatch reads it.")
    gpu_option: Literal["gpus-per-node", "gres"] = Field("gpus-per-node", description="How GPUs are asked for.")
    cpus_per_task: int | None = Field(None, ge=1, description="Cores of a task: under start: node, those of a node.")
    memory: str | int | None = Field(None, description="--mem of a node; 0: all.")
    exclusive: bool = Field(False, description="Share nodes with no other job.")
    sbatch: list[str] = Field(default_factory=list, description="More options of sbatch, one an entry.")
    modules: list[str] = Field(default_factory=list, description="Environment modules to load.")
    venv: str | None = Field(None, description="Folder of a virtual environment to activate.")
    conda: str | None = Field(None, description="Conda environment to activate.")
    python: str | None = Field(
        None, description="Interpreter; null: that of venv or conda if there is one, else the one that submits."
    )
    container: ContainerConfig | None = Field(None, description="Container that processes run in.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables to set.")
    interface: str | None = Field(None, description="Network interface of gloo and NCCL; null: they choose.")
    setup: str = Field("", description="Lines of bash before the start, taken as they are.")
    start: Literal["node", "task"] = Field(
        "node",
        description="node: a task on each node starts the processes there, and starts them again when one dies; "
        "task: srun starts every process.",
    )
    signal_seconds: int = Field(
        120, ge=10, description="Processes are told to save this long before the time limit, or up to a minute earlier."
    )
    max_requeues: int = Field(20, ge=0, description="How often a job may be started again, for whatever reason.")
    template: str | None = Field(None, description="Script to fill in; null: slurm/job.sh.")

    def interpreter(self) -> str:
        """The Python of the processes."""
        if self.container is not None:
            return self.container.python
        return self.host_interpreter()

    def host_interpreter(self) -> str:
        """The Python of a job's script, outside of a container."""
        return self.python or ("python" if self.venv or self.conda else sys.executable)

    def prologue(self) -> str:
        """Lines of bash that make the environment."""
        lines = [f"module load {shlex.quote(name)}" for name in self.modules]
        if self.venv is not None:
            lines.append(f"source {shlex.quote(self.venv.rstrip('/') + '/bin/activate')} || exit 2")
        if self.conda is not None:
            lines += [
                'eval "$(conda shell.bash hook)" || exit 2',
                f"conda activate {shlex.quote(self.conda)} || exit 2",
            ]
        variables = dict(self.env)
        if self.interface is not None:
            variables = {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface, **variables}
        lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        return "\n".join([*lines, self.setup.rstrip("\n")]).strip("\n")


def load_cluster(name: str, **options: str | None) -> ClusterConfig:
    """The settings of a file, or of one of configs/cluster by its name, with the options that were given laid over.

    Raises:
        UserError: no such file, or a wrong key in it.
    """
    file = Path(name)
    if file.suffix not in (".yaml", ".yml"):
        file = _FOLDER / f"{name}.yaml"
        if not file.exists():
            known = sorted(path.stem for path in _FOLDER.glob("*.yaml"))
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"--cluster {name}: no such file in {_FOLDER}; {hint}")
    tree = read_tree(file)
    cluster = validate(
        ClusterConfig, {**tree, **{key: value for key, value in options.items() if value is not None}}, str(file)
    )
    for name in cluster.env:
        if not name.isidentifier():
            raise UserError(f"{file}: 'env': {name!r} is no name of a variable; use letters, digits and _")
    return cluster
