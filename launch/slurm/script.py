"""A job's script: the template, filled in so that whatever a value holds stays a value."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UserError
from launch import ROOT
from launch.slurm.cluster import ClusterConfig

TEMPLATE = ROOT / "slurm" / "job.sh"


@dataclass(frozen=True)
class Plan:
    """What a job is to run, and on what."""

    name: str
    nodes: int
    nproc: int  # processes on a node
    gpus: int  # of a node; 0: none asked for
    directory: Path  # the working directory
    submission: Path  # folder of script, log, config and code
    run: Path  # folder of the run; of an array, without the number of an element
    words: list[str]  # overrides of all elements
    elements: dict[int, list[str]]  # of an array: overrides of each; empty: no array
    array: str | None  # as sbatch has it
    runs: Mapping[int, Path] = field(default_factory=dict)  # of an array whose runs have a folder and config each


def render(plan: Plan, cluster: ClusterConfig) -> str:
    """The script.

    Raises:
        UserError: a value that no script can hold, or a template with a word that is not known.
    """
    config = plan.submission / "config.yaml"
    folders = [str(plan.directory), str(plan.submission)]
    container = cluster.container
    many = [] if cluster.start == "task" else ["--nproc", str(plan.nproc)]
    srun = [f"--kill-on-bad-exit={int(cluster.start == 'task')}", *(["--cpu-bind=none"] * (cluster.start == "node"))]
    srun += ["--gpu-bind=none"] * (plan.gpus > 0)  # a process that sees its own GPU alone cannot reach those of others
    srun += container.srun(folders) if container is not None else []
    values = {
        "sbatch": "\n".join(f"#SBATCH {line}" for line in sbatch_lines(plan, cluster)),
        "directory": shlex.quote(str(plan.directory)),
        "setup": cluster.prologue(),
        "submission": shlex.quote(str(plan.submission)),
        "python": shlex.quote(cluster.interpreter()),
        "host_python": shlex.quote(cluster.host_interpreter()),
        "run": shlex.quote(str(plan.run)),
        "words": shlex.join([*many, *([] if plan.runs else [str(config)]), *plan.words]),
        "elements": _elements(plan),
        "srun": shlex.join(srun),
        "max_requeues": str(cluster.max_requeues),
        "inside": shlex.join(container.inside(folders)) if container is not None else "",
    }
    file = Path(cluster.template) if cluster.template is not None else TEMPLATE
    if not file.is_file():
        raise UserError(f"'template': {file} is not there; give the path of a copy of {TEMPLATE}")

    def fill(marker: re.Match[str]) -> str:
        if marker[1] not in values:
            raise UserError(f"{file}: @@{marker[1]}@@ is nothing to fill in; known are {', '.join(sorted(values))}")
        return values[marker[1]]

    return re.sub(r"@@(\w+)@@", fill, file.read_text(encoding="utf-8"))


def sbatch_lines(plan: Plan, cluster: ClusterConfig) -> list[str]:
    """Options of sbatch, as its script has them."""
    log = plan.submission / ("log-%A_%a.txt" if plan.array is not None else "log-%j.txt")
    options: dict[str, str | int | None] = {
        "job-name": plan.name,
        "nodes": plan.nodes,
        "ntasks-per-node": plan.nproc if cluster.start == "task" else 1,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "time": cluster.time,
        "array": plan.array,
        "mem": cluster.memory,
        "cpus-per-task": cluster.cpus_per_task,
        "output": f"{str(log.parent).replace('%', '%%')}/{log.name}",
        "open-mode": "append",
        "signal": f"USR1@{cluster.signal_seconds}",
    }
    if plan.gpus:
        name = cluster.gpu_option
        options[name] = f"gpu:{plan.gpus}" if name == "gres" else plan.gpus
    lines = [f"--{name}={_quoted(name, str(value))}" for name, value in options.items() if value is not None]
    return [*lines, "--requeue", *["--exclusive"] * cluster.exclusive, *cluster.sbatch]


def _quoted(option: str, value: str) -> str:
    """A value as sbatch reads it from a script: it knows quotes, but neither variables nor commands."""
    if any(ord(letter) < 32 for letter in value) or "\\" in value:
        raise UserError(
            f"sbatch cannot read {value!r} as --{option}: it has a backslash or a control character; choose another"
        )
    if re.fullmatch(r"[\w./:@%+,=-]+", value, re.ASCII):
        return value
    return '"' + value.replace('"', '\\"') + '"'


def _elements(plan: Plan) -> str:
    """What differs between the elements of an array."""
    if not plan.elements:
        return "# No array: there is one run."
    lines = ['case "$SLURM_ARRAY_TASK_ID" in']
    for number, words in plan.elements.items():
        own = f" run={shlex.quote(str(plan.runs[number]))}" if plan.runs else ""
        lines.append(f"    {number}) words+=({shlex.join(words)}){own} ;;")
    return "\n".join([*lines, "    *) exit 2 ;;", "esac", *([] if plan.runs else ['run="$run-$SLURM_ARRAY_TASK_ID"'])])
