"""Two hosts on this machine: network namespaces that a veth pair joins, each with a host name of its own. Needs root.

    host "left"  10.87.N.1 ---- 10.87.N.2  host "right"      a command in one of them: `hosts.command("left") + [...]`

They share the file system, as nodes of a cluster do, and reach nothing else.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

NAMES = ("left", "right")
INTERFACE = "regatta0"
"""What each host calls its network."""
END_S = 10.0
_made = count()


@dataclass(frozen=True)
class TwoHosts:
    """The hosts of one test process, whose number distinguishes their names from those of others."""

    number: int

    def namespace(self, host: str) -> str:
        return f"regatta-{self.number}-{host}"

    def address(self, host: str) -> str:
        return f"10.{87 + self.number // 256 % 64}.{self.number % 256}.{1 + NAMES.index(host)}"

    def command(self, host: str) -> list[str]:
        """The start of a command line that runs on a host, and names it as its own."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.namespace(host), *named]

    def ssh(self, folder: Path) -> str:
        """A command in the place of ssh: it reaches a host by its address."""
        script = folder / "ssh.sh"
        cases = [f'{self.address(host)}) set -- {shlex.join(self.command(host))} sh -c "$2" ;;' for host in NAMES]
        lines = ["#!/bin/sh", 'case "$1" in', *cases, '*) echo "no route to $1" >&2; exit 255 ;;', "esac", 'exec "$@"']
        script.write_text("\n".join(lines) + "\n")
        script.chmod(0o755)
        return str(script)

    def processes(self, *hosts: str) -> list[int]:
        """All processes on these hosts, without a name on both."""
        said = [_ip("netns", "pids", self.namespace(host), fails=True) for host in hosts or NAMES]
        return [int(word) for one in said for word in one.split()]


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Within it both are there; then nothing is left of them, processes included."""
    if os.geteuid():
        pytest.skip("needs root: network namespaces")
    hosts = TwoHosts(os.getpid() % 10000 + 10000 * next(_made))
    try:
        for host in NAMES:
            _ip("netns", "add", hosts.namespace(host))
            _ip("-n", hosts.namespace(host), "link", "set", "lo", "up")
        ends = [f"rg{hosts.number}{host[0]}" for host in NAMES]  # at most 15 characters
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(NAMES, ends, strict=True):
            _ip("link", "set", end, "netns", hosts.namespace(host))
            own = ("-n", hosts.namespace(host))
            _ip(*own, "link", "set", end, "name", INTERFACE)
            _ip(*own, "addr", "add", f"{hosts.address(host)}/24", "dev", INTERFACE)
            _ip(*own, "link", "set", INTERFACE, "up")
        yield hosts
    finally:
        deadline = time.monotonic() + END_S
        while (left := hosts.processes()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        _ip("link", "del", f"rg{hosts.number}{NAMES[0][0]}", fails=True)  # if it is in no namespace yet
        for host in NAMES:
            _ip("netns", "del", hosts.namespace(host), fails=True)


def _ip(*words: str, fails: bool = False) -> str:
    """What `ip` prints; it may fail where `fails`."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    assert fails or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout
