"""What this machine offers."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes of main memory that this process and others here may still take: the machine's, or less in a container."""
    left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = _numbers("/proc/meminfo")
    left = min(left, 1024 * meminfo["MemAvailable"] if "MemAvailable" in meminfo else left)
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        # What the container's files hold in the page cache can be given back.
        cached = _numbers("/sys/fs/cgroup/memory.stat").get("inactive_file", 0)
        left = min(left, limit - used + cached)
    return max(0, left)


def _numbers(path: str) -> dict[str, int]:
    """The lines `name number` or `name: number unit` of a file of the kernel's; none where there is no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.replace(":", " ").split()[:2] for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: str) -> int | None:
    """The only number of a file; None where there is no such file or it says `max`."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
