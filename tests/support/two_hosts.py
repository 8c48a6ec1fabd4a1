"""Two hosts on this machine: network namespaces that a veth pair joins, each with a host name of its own. Needs root.

    host "left"  10.87.N.1 ---- 10.87.N.2  host "right"      a command in one of them: `hosts.command("left") + [...]`
    sshd ------------^              ^------------ sshd       with hosts.sshd(folder) as ssh: `ssh` reaches both

They share the file system, as nodes of a cluster do, and reach nothing else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from harness.config.schema import LaunchConfig

NAMES = ("left", "right")
INTERFACE = "regatta0"
"""What each host calls its network."""
END_S = 10.0
SSH_PORT = 2222
INSTALL = "apt-get install -y --no-install-recommends openssh-server openssh-client"
SERVER = """Port {port}
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
"""
"""What sshd reads in the place of /etc/ssh/sshd_config."""
CLIENT = """Port {port}
IdentityFile {folder}/user
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
"""
"""What ssh reads in the place of ~/.ssh/config."""
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

    @contextmanager
    def sshd(self, folder: Path) -> Iterator[str]:
        """Within it each host has an sshd, with keys and files of its own in `folder`. Yields the command that reaches
        them by their addresses, from the first one: `launch.ssh` as it is by default, with these files."""
        server = shutil.which("sshd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
        if not server or not shutil.which("ssh"):
            pytest.skip(f"needs sshd and ssh: {INSTALL}")
        for key in ("host", "user"):
            _said("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / key))
        public, addresses = (folder / "host.pub").read_text(), [self.address(host) for host in NAMES]
        (folder / "known_hosts").write_text("".join(f"[{one}]:{SSH_PORT} {public}" for one in addresses))
        (folder / "ssh_config").write_text(CLIENT.format(port=SSH_PORT, folder=folder))
        with ExitStack() as stack:
            for host in NAMES:
                stack.enter_context(self._sshd(host, server, folder))
            yield f"ip netns exec {self.namespace(NAMES[0])} {LaunchConfig().ssh} -F {folder / 'ssh_config'}"

    @contextmanager
    def _sshd(self, host: str, server: str, folder: Path) -> Iterator[None]:
        """The sshd of a host, in which /run is its own: sshd wants a folder there."""
        configuration, log = folder / f"sshd_{host}", folder / f"sshd_{host}.log"
        configuration.write_text(SERVER.format(port=SSH_PORT, address=self.address(host), folder=folder))
        begin = 'mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && exec "$@"'
        command = [*self.command(host), "sh", "-c", begin, "sh", server, "-D", "-f", str(configuration), "-E", str(log)]
        with subprocess.Popen(command) as process:
            try:
                deadline = time.monotonic() + END_S
                while not log.exists() or "listening" not in log.read_text():
                    assert process.poll() is None and time.monotonic() < deadline, log.exists() and log.read_text()
                    time.sleep(0.02)
                yield
            finally:
                process.kill()

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
    return _said("ip", *words, fails=fails)


def _said(*command: str, fails: bool = False) -> str:
    """What a command prints; it may fail where `fails`."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert fails or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
