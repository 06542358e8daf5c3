"""`gramian slurm submit`: check a config, say what is going to happen, and hand it to SLURM."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from common.config import parse_yaml, read_tree
from common.errors import UserError
from common.files import atomic_write, next_numbered
from launch.finish import is_finished
from launch.slurm.cluster import ClusterConfig, load_cluster
from launch.slurm.control import SlurmError, answering, slurm
from launch.slurm.script import Plan, render
from launch.slurm.snapshot import take_snapshot
from models.flops import parameter_parts
from trainer.config import TrainingConfig, load_config
from trainer.layout import Layout, plan_layout
from trainer.rundir import RunDirectory, run_directory


@dataclass(frozen=True)
class Request:
    """The words of the command line."""

    config_path: str
    overrides: list[str]
    nodes: int
    gpus_per_node: int
    nproc: int | None
    cluster: str
    options: dict[str, str | None]  # partition, account, time
    array: str | None
    vary: list[str]
    dry_run: bool


def run_submit(request: Request) -> None:
    """Submit, or with `--dry-run` only show what would be submitted."""
    cluster = load_cluster(request.cluster, **request.options)
    nproc = request.nproc or max(1, request.gpus_per_node)
    config = load_config(request.config_path, request.overrides)
    elements = _elements(request, config.run.name)
    configs = [load_config(request.config_path, [*request.overrides, *words]) for words in elements.values()]
    configs = configs or [config]
    layouts = [plan_layout(each, request.nodes * nproc, nproc) for each in configs]
    runs = [(each, run_directory(each)) for each in configs]
    for each, directory in runs:
        directory.check_config(each)
        directory.check_writable()
    if all(is_finished(each, directory) for each, directory in runs):
        raise UserError(
            f"run '{config.run.name}' is finished: all {config.train.steps} steps are made; set train.steps to more, "
            f"or another run.name"
        )
    run = run_directory(config).path.absolute()
    submission = next_numbered(run / "slurm")
    plan = Plan(
        config.run.name,
        request.nodes,
        nproc,
        request.gpus_per_node,
        Path.cwd(),
        submission,
        run,
        request.overrides,
        elements,
        _array(request.array, elements),
    )
    script = render(plan, cluster)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{_plan_in_words(configs[0], layouts[0], plan)}\n\n{script}", markup=False)
    if request.dry_run:
        return
    check_cluster(cluster, request.nodes, request.gpus_per_node)
    (submission / "code").mkdir(parents=True)
    try:
        take_snapshot(submission / "code")
        tree = read_tree(Path(request.config_path))  # with what is left open, as replicas by machine are
        atomic_write(submission / "config.yaml", yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
        atomic_write(submission / "job.sh", script)
        job = sbatch(submission / "job.sh")
    except BaseException:
        shutil.rmtree(submission)
        raise
    record = {
        "job": job,
        "time": round(time.time(), 3),
        "nodes": request.nodes,
        "nproc": nproc,
        "log": log_of(plan, job),
    }
    names = {str(number): f"{config.run.name}-{number}" for number in elements}
    atomic_write(submission / "submit.json", json.dumps({**record, "elements": names}, indent=1) + "\n")
    console.print(
        f"job    {job}\nlog    {record['log']}\nnext   gramian slurm status {shlex.quote(str(run))}", markup=False
    )


def log_of(plan: Plan, job: str) -> str:
    """Where a job writes; `*` for the element of an array."""
    return str(plan.submission / (f"log-{job}_*.txt" if plan.array is not None else f"log-{job}.txt"))


def _plan_in_words(config: TrainingConfig, layout: Layout, plan: Plan) -> str:
    """Mesh, batch and memory."""
    lines = [f"job    {plan.name}: {plan.nodes} nodes x {plan.nproc} processes", layout.describe()]
    if plan.elements:
        lines[0] += f", array {plan.array}"
    if (vocab_size := config.known_vocab_size) is not None:
        total = sum(part.total for part in parameter_parts(config.model.with_vocab_size(vocab_size)))
        share = layout.dp_shard * layout.tp
        lines.append(
            f"memory {total:,} parameters; weights and gradients in fp32 / {share} = "
            f"{8 * total / share / 2**30:.3g} GiB a process, before optimizer state and activations"
        )
    return "\n".join(lines)


def _elements(request: Request, name: str) -> dict[int, list[str]]:
    """Overrides of each element of an array: its own name, and its values of the keys that vary."""
    if not request.vary:
        if request.array is not None:
            raise UserError("--array needs --vary KEY=[VALUE, ...], which says what differs between its runs")
        return {}
    columns: dict[str, list[Any]] = {}
    for word in request.vary:
        key, _, text = word.partition("=")
        values = parse_yaml(text, f"--vary '{word}'")
        if not isinstance(values, list) or not values:
            raise UserError(f"--vary '{word}': must be KEY=[VALUE, ...], for example run.seed=[0, 1, 2, 3]")
        columns[key] = values
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        raise UserError(f"--vary: lists of {' and '.join(map(str, sorted(lengths)))} values; give all the same number")
    return {
        number: [
            f"run.name={name}-{number}",
            *(f"{key}={json.dumps(values[number])}" for key, values in columns.items()),
        ]
        for number in range(lengths.pop())
    }


def _array(given: str | None, elements: dict[int, list[str]]) -> str | None:
    """sbatch's --array: what is given, or all elements."""
    if not elements:
        return None
    if given is None:
        return f"0-{len(elements) - 1}"
    if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?|%\d+", given):
        raise UserError(f"--array {given}: must be numbers as 0-3, 0-3%2 (two at a time), 1,3 or %2")
    array = f"0-{len(elements) - 1}{given}" if given.startswith("%") else given
    if max(map(int, re.findall(r"\d+", array.partition("%")[0]))) >= len(elements):
        raise UserError(
            f"--array {given}: --vary has {len(elements)} values, so that runs are 0 to {len(elements) - 1}"
        )
    return array


def check_cluster(cluster: ClusterConfig, nodes: int, gpus: int) -> None:
    """Refuse what no partition has; SLURM would say so less clearly, or let the job wait for ever."""
    with answering():
        rows = [line.split("|") for line in slurm("sinfo", "-h", "-o", "%R|%D|%G|%P").splitlines()]
    names = sorted({row[0] for row in rows})
    if cluster.partition is not None:
        wanted = cluster.partition.split(",")
        for name in wanted:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]}? There are" if near else "there are"
                raise UserError(f"--partition {name}: the cluster has none of this name; {hint} {', '.join(names)}")
        rows = [row for row in rows if row[0] in wanted]
    elif any(row[3].endswith("*") for row in rows):
        rows = [row for row in rows if row[3].endswith("*")]
    where = f"partition {cluster.partition}" if cluster.partition is not None else "the default partition"
    most = max((_gpus(row[2]) for row in rows), default=0)
    if gpus > most:
        raise UserError(
            f"--gpus-per-node {gpus}: a node of {where} has {most}; ask for at most that, or another --partition"
        )
    there = sum(int(row[1]) for row in rows)
    if nodes > there:
        raise UserError(f"--nodes {nodes}: {where} has {there}; ask for fewer, or another --partition")


def _gpus(gres: str) -> int:
    """GPUs of a node, from gpu:8, gpu:h100:8(S:0-1) and the like; several kinds are added up."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))


def sbatch(script: Path) -> str:
    """Submit; the job's number."""
    try:
        return slurm("sbatch", "--parsable", str(script)).strip().partition(";")[0]
    except SlurmError as error:
        raise UserError(f"sbatch refused the job: {error}; change the option, or the cluster file") from None


def submissions(run: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Folders and records of a run's submissions, oldest first.

    Raises:
        UserError: there are none.
    """
    files = sorted((run / "slurm").glob("[0-9]*/submit.json"))
    if not files:
        what = "was never submitted" if RunDirectory(run).path.exists() else "is not there"
        raise UserError(f"{run}: this run {what}; give the run directory that `gramian slurm submit` has printed")
    return [(file.parent, json.loads(file.read_text(encoding="utf-8"))) for file in files]
