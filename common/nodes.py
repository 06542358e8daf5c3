"""Several machines that train together: which this one is, and where they meet. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from common.errors import UserError


class Nodes(NamedTuple):
    """How many machines there are, which of them this is, and where the first one listens."""

    total: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0  # any
    option: str = "--rdzv"  # where host and port were given, for messages


def parse_nodes(count: int, rank: int | None, rdzv: str | None) -> Nodes:
    """What `--nnodes`, `--node-rank` and `--rdzv` say.

    Raises:
        UserError: they do not go together, or the address has not the form HOST:PORT or [IPv6]:PORT.
    """
    if count == 1:
        if rdzv is not None or rank:
            raise UserError("--node-rank and --rdzv are for several machines; add --nnodes, or drop them")
        return Nodes()
    if rdzv is None or rank is None:
        raise UserError(
            f"--nnodes {count} needs --node-rank, 0 to {count - 1}, another on every machine, and --rdzv HOST:PORT, an "
            f"address of machine 0 with a free port, the same on all"
        )
    if rank >= count:
        raise UserError(f"--node-rank is {rank} but --nnodes {count}: machines are numbered 0 to {count - 1}")
    return Nodes(count, rank, *split_address("--rdzv", rdzv))


def split_address(option: str, given: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPv6]:PORT.

    Raises:
        UserError: it is neither; `option` is what it was given as.
    """
    host, colon, port = given.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536 or not host.strip("[]"):
        raise UserError(f"{option} {given}: must be HOST:PORT, for example 10.0.0.1:29400, or [fd00::1]:29400")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise UserError(f"{option} {given}: put an IPv6 address in brackets, as in [fd00::1]:29400")
    return host.strip("[]"), int(port)


def shown_address(host: str, port: int) -> str:
    """HOST:PORT, with the brackets of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
