"""The network by which ranks on several nodes reach each other: `launch.interface`, or where they see rank 0."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress

from harness.core.problem import Problem, refuse

KEY = "launch.interface"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915


def problem(name: str | None) -> Problem | None:
    """Return the problem of a `launch.interface` that this node does not have."""
    there = [found for _, found in socket.if_nameindex()]
    if name is None or name in there:
        return None
    fixes = tuple({KEY: one} for one in there if one != "lo") or ({KEY: "lo"},)
    return Problem(KEY, name, f"is no network interface of {socket.gethostname()}: {', '.join(there)}", fixes)


def use(name: str | None) -> None:
    """Have gloo and NCCL, in this process and its children, use the interface; without a name they choose. Raises
    `CannotRun` where this node does not have it."""
    refuse([wrong] if (wrong := problem(name)) else [], "this run")
    if name is not None:
        os.environ |= {GLOO: name, NCCL: f"={name}"}  # without the equals sign NCCL takes eth0 for eth01, too


def use_that_of(here: str) -> None:
    """Have gloo use the network of this address, unless the user has chosen one: it would resolve the host's name,
    often to 127.0.1.1."""
    if device := interface(here):
        os.environ.setdefault(GLOO, device)


def address(there: str) -> str:
    """This node's address on the network on which it sees the node `there`, an address or a name."""
    family, *_, where = socket.getaddrinfo(there, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])


def interface(here: str) -> str | None:
    """The network interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == here:
                    return name
    return None
