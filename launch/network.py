"""Addresses and interfaces of this machine. Imports no torch."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def interfaces() -> dict[str, list[str]]:
    """Numeric addresses of each network interface: the first of IPv4, and all of IPv6."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            found[name] = []
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name].append(socket.inet_ntoa(answer[20:24]))
            except OSError:  # it has none
                continue
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def address_towards(host: str) -> str | None:
    """The address of ours by which packets to a host leave; None where there is no way. Nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The interface that has an address."""
    return next((name for name, addresses in interfaces().items() if address in addresses), None)


def choose_interface(host: str) -> None:
    """Let gloo use the interface that leads to `host`, unless the user has chosen one.

    By itself it takes the one that this machine's name resolves to, which often is the loopback. NCCL looks for the
    fastest itself.
    """
    address = address_towards(host)
    name = interface_of(address) if address is not None else None
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
