"""`gramian doctor`: what of this machine, or of several together, could keep a run from training or slow it down."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from rich.table import Table

from common.errors import CheckFailed, UserError
from common.machine import available_cores, available_memory
from common.nodes import Nodes
from common.ranks import is_worker
from launch.network import interfaces
from launch.reports import check_writable, report_console, write_json

_PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "sentencepiece")
_DISK_MB, _SLOW_DISK, _LITTLE_DISK = 64, 50.0, 10e9  # MB written; MB/s and bytes below which there is a warning


class Check(NamedTuple):
    """One finding. What to do stands in `what` where the verdict is not pass."""

    name: str
    verdict: Literal["pass", "warn", "fail"]
    what: str
    host: str = ""


def run_doctor(nodes: bool, folder: Path, nproc: int | None, where: Nodes, json_file: str | None) -> None:
    """Check this machine; with `nodes`, all ranks of an allocation or of `where`, and what is between them.

    Raises:
        CheckFailed: something that no run would get past.
    """
    check_writable("--json", json_file)
    if not nodes:
        report(local_checks(folder), json_file)
        return
    from launch.train import default_processes

    options = ["--nodes", "--dir", str(folder), *(["--json", json_file] if json_file is not None else [])]
    if not is_worker() and where.total == 1:
        where = _allocation(nproc, options)
    if is_worker():
        _be_rank(folder, json_file)
        return
    from launch.local import start_workers

    with tempfile.TemporaryDirectory(prefix="gramian-doctor-") as logs:
        start_workers(["-m", "gramian", "doctor", *options], nproc or default_processes(), Path(logs), nodes=where)


def _allocation(nproc: int | None, options: list[str]) -> Nodes:
    """The place in a SLURM allocation, if this is one; in its shell srun takes the place of this process."""
    from launch.slurm.step import read_step, step_to_start

    step = read_step(os.environ)
    if step is None:
        if (command := step_to_start(os.environ, nproc, "doctor", options)) is not None:
            os.execvp(command[0], command)
        return Nodes()
    if step.starts_workers:
        return step.launchers(os.environ)
    step.become_rank(os.environ)
    return Nodes()


def _be_rank(folder: Path, json_file: str | None) -> None:
    """Check as one of the ranks; rank 0 reports for all."""
    from launch.report_errors import user_errors
    from trainer.preflight import group_checks
    from trainer.runtime import start_runtime

    with start_runtime() as runtime, user_errors():
        checks = group_checks(runtime, lambda: [check._asdict() for check in local_checks(folder)])
        if runtime.is_main:
            report([Check(**check) for check in checks], json_file)


def report(checks: list[Check], json_file: str | None) -> None:
    """Show all findings, worst last.

    Raises:
        CheckFailed: there are some that no run would get past.
    """
    write_json(json_file, {"checks": [check._asdict() for check in checks]})
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in ("pass", "warn", "fail")}
    if json_file != "-":
        several = len({check.host for check in checks}) > 1
        table = Table("", "check", *["host"] * several, "finding")
        for check in checks:
            table.add_row(check.verdict, check.name, *[check.host] * several, check.what)
        report_console().print(table)
        print(f"{counts['pass']} pass, {counts['warn']} warn, {counts['fail']} fail", flush=True)
    if counts["fail"]:
        names = ", ".join(dict.fromkeys(check.name for check in checks if check.verdict == "fail"))
        raise CheckFailed(f"{counts['fail']} of {len(checks)} checks fail: {names}")


def local_checks(folder: Path) -> list[Check]:
    """What can be found on one machine. `folder` is where runs will be written."""
    host = socket.gethostname()
    checks: list[Check] = []
    for check in (_versions, _gpus, _memory, _interfaces, _name, _port, _slurm):
        checks += _guarded(check.__name__.strip("_"), check)
    checks += _guarded("disk", lambda: _disk(folder))
    return [check._replace(host=host) for check in checks]


def _guarded(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    try:
        return check()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return [Check(name, "warn", f"could not be checked: {error}")]


def _versions() -> list[Check]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            return [Check("versions", "fail", f"{name} is not installed in {sys.prefix}; pip install -e . there")]
    return [Check("versions", "pass", f"Python {platform.python_version()}, {', '.join(found)}")]


def _gpus() -> list[Check]:
    import torch

    driver = shutil.which("nvidia-smi")
    if not torch.cuda.is_available():
        if driver is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            asked = subprocess.run([driver, "-L"], capture_output=True, text=True, timeout=30)
            if asked.returncode == 0 and asked.stdout.strip():
                build = torch.version.cuda or "none"
                what = f"nvidia-smi sees GPUs and torch (CUDA {build}) does not; install a torch for this driver"
                return [Check("GPUs", "fail", what)]
        return [Check("GPUs", "pass", "none: training is on the CPU")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    checks = [Check("GPUs", "pass", f"{len(names)}: {', '.join(dict.fromkeys(names))}; CUDA {torch.version.cuda}")]
    if driver is not None:
        asked = subprocess.run(
            [driver, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
        checks.append(Check("driver", "pass", ", ".join(dict.fromkeys(asked.stdout.split()))))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    checks.append(Check("NCCL", "pass", nccl))
    for number in range(len(names)):
        free, total = torch.cuda.mem_get_info(number)
        if free < 0.9 * total:
            what = f"GPU {number} has {(total - free) / 2**30:.1f} GiB in use; see nvidia-smi for whose they are"
            checks.append(Check("GPU memory", "warn", what))
    return checks


def _memory() -> list[Check]:
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
    room = f"{available_memory() / 2**30:.1f} GiB of memory, {available_cores()} cores"
    if shared is not None and shared.free < 2**28:
        what = f"/dev/shm has {shared.free >> 20} MiB left; give a container more, as by --shm-size"
        return [Check("memory", "pass", room), Check("shared memory", "warn", what)]
    return [Check("memory", "pass", room)]


def _interfaces() -> list[Check]:
    known = {name: found for name, found in interfaces().items() if found}
    shown = "; ".join(f"{name} {' '.join(found)}" for name, found in known.items())
    checks = [Check("interfaces", "pass", shown)]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").lstrip("=")  # NCCL takes prefixes and lists
    if chosen and chosen not in known:
        what = f"GLOO_SOCKET_IFNAME is {chosen}, which is not there; set one of {', '.join(known)}, or unset it"
        checks.append(Check("interfaces", "fail", what))
    return checks


def _name() -> list[Check]:
    host = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        what = f"{host} does not resolve here; put it into /etc/hosts or DNS, or give addresses instead of names"
        return [Check("name resolution", "warn", what)]
    others = [a for found in interfaces().values() for a in found if not a.startswith(("127.", "::1", "fe80"))]
    if address.startswith("127.") and others:
        what = f"{host} is {address}, which leads nowhere from other machines; give them an address, not this name"
        return [Check("name resolution", "warn", what)]
    return [Check("name resolution", "pass", f"{host} is {address}")]


def _port() -> list[Check]:
    with socket.create_server(("", 0)) as server:
        socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=5).close()
    return [Check("port", "pass", "a port can be listened on, and reached from here")]


def _slurm() -> list[Check]:
    if shutil.which("sinfo") is None:
        return [Check("SLURM", "pass", "none here")]
    from launch.slurm.control import SlurmError, slurm

    try:
        up = len(set(slurm("sinfo", "-h", "-N", "-r", "-o", "%N").split()))
        return [Check("SLURM", "pass", f"{slurm('sinfo', '--version').strip()}, {up} nodes up")]
    except SlurmError as error:
        return [Check("SLURM", "warn", f"does not answer: {error}; see whether slurmctld runs, or SLURM_CONF is right")]


def _disk(folder: Path) -> list[Check]:
    """Space, and the speed of a write that is flushed to the disk, as a checkpoint's is."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UserError(f"--dir {folder}: {place} is not a folder you may write to; choose another")
    free = shutil.disk_usage(place).free
    file = place / f".gramian-doctor-{os.getpid()}"
    block = os.urandom(1 << 20)
    begin = time.perf_counter()
    try:
        with open(file, "wb") as out:
            for _ in range(_DISK_MB):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        speed = _DISK_MB * (1 << 20) / 1e6 / (time.perf_counter() - begin)
    finally:
        file.unlink(missing_ok=True)
    slow, little = speed < _SLOW_DISK, free < _LITTLE_DISK
    what = f"{place}: {free / 1e9:.0f} GB free, {speed:.0f} MB/s written to the disk"
    if slow or little:
        what += "; choose a run.dir with more room" if little else "; saves will be slow there, choose a faster run.dir"
    return [Check("disk", "warn" if slow or little else "pass", what)]
