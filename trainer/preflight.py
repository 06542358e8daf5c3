"""What ranks find out about one another before they train: clocks, speed between them, what each finds at its place."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError
from trainer.runtime import Runtime

_BYTES = 16 << 20
_TIMES = 5
_SKEW = 1.0  # seconds between clocks from which logs and heartbeats confuse
# Bytes a second below which one must suspect that traffic takes the wrong way.
_SLOW = {"cpu": 50e6, "cuda": 1e9}

Found = dict[str, Any]  # name, verdict (pass, warn, fail), what, host


def group_checks(runtime: Runtime, local: Callable[[], list[Found]] | None = None) -> list[Found]:
    """Findings of all ranks, the same list on every one. All ranks call it.

    Args:
        local: what to find on each machine; one rank of each calls it.
    """
    host = socket.gethostname()
    hosts: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(hosts, host)
    mine: list[Found] = local() if local is not None and hosts.index(host) == runtime.rank else []
    everywhere: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(everywhere, mine)
    found: list[Found] = [check for checks in everywhere for check in checks]
    found += _versions_agree(runtime, hosts)
    found.append(_clocks(runtime, hosts))
    found += _speeds(runtime, hosts)
    return found


def preflight(runtime: Runtime, say: Callable[[str], None]) -> None:
    """`launch.preflight`: check the group before training, and say what was found.

    Raises:
        UserError: on all ranks, something that would keep the run from training.
    """
    checks = group_checks(runtime)
    for check in checks:
        say(f"check  {check['verdict']}  {check['name']}: {check['what']}")
    failed = [check for check in checks if check["verdict"] == "fail"]
    if failed:
        raise UserError(f"preflight: {failed[0]['name']}: {failed[0]['what']}")


def _found(name: str, verdict: str, what: str) -> Found:
    return {"name": name, "verdict": verdict, "what": what, "host": "all"}


def _versions_agree(runtime: Runtime, hosts: list[str]) -> list[Found]:
    versions: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(versions, torch.__version__)
    for rank, other in enumerate(versions):
        if other != versions[0]:
            what = f"torch {versions[0]} on {hosts[0]}, {other} on {hosts[rank]}; give all the same environment"
            return [_found("same versions", "fail", what)]
    return [_found("same versions", "pass", f"torch {versions[0]} on all {len(set(hosts))} hosts")]


def _clocks(runtime: Runtime, hosts: list[str]) -> Found:
    """Each rank's clock against rank 0's, right after a barrier: the smallest of some, as the barrier is not exact."""
    skews = [float("inf")] * runtime.world_size
    for _ in range(_TIMES):
        dist.barrier()
        times: list[Any] = [None] * runtime.world_size
        dist.all_gather_object(times, time.time())
        skews = [min(skew, abs(other - times[0])) for skew, other in zip(skews, times, strict=True)]
    worst = max(range(runtime.world_size), key=skews.__getitem__)
    what = f"{1000 * skews[worst]:.1f} ms apart at most"
    if skews[worst] > _SKEW:
        what += f", on {hosts[worst]} and {hosts[0]}; have both set by NTP"
        return _found("clocks", "warn", what)
    return _found("clocks", "pass", what)


def _speeds(runtime: Runtime, hosts: list[str]) -> list[Found]:
    """Bytes a second that a rank sends: an all-reduce sends 2 (n - 1) / n of a tensor, an all-to-all (n - 1) / n."""
    if runtime.world_size == 1:
        return []
    world = runtime.world_size
    sent = torch.ones(_BYTES // 4 // world * world, device=runtime.device)
    received = torch.empty_like(sent)
    by: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: dist.all_reduce(sent),
        "all-to-all": lambda: dist.all_to_all_single(received, sent),
    }
    found = []
    for name, send in by.items():
        seconds = _seconds(runtime, send)
        rate = sent.nbytes * (world - 1) / world * (2 if name == "all-reduce" else 1) / seconds
        what = f"{rate / 1e9:.2f} GB/s a rank, {world} ranks on {len(set(hosts))} hosts"
        slow = rate < _SLOW[runtime.device.type]
        if slow:
            what += "; set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the fast interface, or look for who else sends"
        found.append(_found(name, "warn" if slow else "pass", what))
    return found


def _seconds(runtime: Runtime, send: Callable[[], Any]) -> float:
    """The shortest of some, each as the ranks see it in the mean."""
    best = float("inf")
    for _ in range(_TIMES + 1):  # the first makes connections
        dist.barrier()
        begin = time.perf_counter()
        send()
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, runtime.sum(time.perf_counter() - begin) / runtime.data_ranks)
    return best
