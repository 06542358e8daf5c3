"""Two hosts on one machine: network and UTS namespaces with a link between them, which can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def missing() -> str | None:
    """Why there can be none here; None: there can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip or unshare not found: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"gramian-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


class Hosts:
    """Hosts `a` (10.99.0.1) and `b` (10.99.0.2)."""

    def __init__(self) -> None:
        self._spaces = [f"gramian-{os.getpid()}-{name}" for name in "ab"]

    def words(self, host: int) -> tuple[str, ...]:
        """Words before a command that is to run on a host."""
        name = "ab"[host]
        shell = 'hostname "$0" && exec "$@"'
        return ("ip", "netns", "exec", self._spaces[host], "unshare", "--uts", "sh", "-c", shell, name)

    def link(self, state: str) -> None:
        """Set the link `up` or `down`."""
        _ip("-n", self._spaces[0], "link", "set", "veth-a", state)

    def make(self) -> None:
        """Make both, and the link."""
        for space in self._spaces:
            _ip("netns", "add", space)
        _ip("-n", self._spaces[0], "link", "add", "veth-a", "type", "veth", "peer", "veth-b", "netns", self._spaces[1])
        for number, space in enumerate(self._spaces):
            device = f"veth-{'ab'[number]}"
            _ip("-n", space, "address", "add", f"10.99.0.{number + 1}/24", "dev", device)
            _ip("-n", space, "link", "set", device, "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Remove what was made."""
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts until the context ends."""
    hosts = Hosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()
