"""Starts an agent on each host and ends all when the first one fails: what srun is for `launch.hosts`.

    python -m harness.launch.hosts.starter '{"hosts": ["a", "b"], "each": 2, "ssh": ["ssh"]}' COMMAND OF A RANK

It prints what the ranks print, with the host before each line. An agent ends when its stdin does: so do all when this
process is killed. Every host answers within `ANSWER_S`, or is reported.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from harness.launch import die_with_parent, same_checkout
from harness.launch.hosts.agent import ASK, CHECKED, LINE, READY

ANSWER_S = 30.0
"""Seconds in which a host must answer."""
END_S = 5.0
"""Seconds that agents have to end their ranks."""
POLL_S = 0.05
KEPT = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
OWN = (
    "REGATTA_",
    "PYTHON",
    "OMP_",
    "GLOO_",
    "NCCL_",
    "CUDA_",
    "TORCH_",
    "PYTORCH_",
    "MALLOC_",
    "LD_PRELOAD",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "CUBLAS_",
)
"""Variables, and beginnings of their names, that ranks get from here: ssh hands on none."""


@dataclass
class Host:
    """A host, and the process that has reached it, if it does."""

    name: str
    process: subprocess.Popen[bytes]
    ready: bool = False
    explained: bool = False
    last: str = ""
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        """Print its lines, with its name before each that is not of this package."""
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip("\r\n")
            if line == READY:
                self.ready = True
            elif line.startswith(LINE):
                self.explained = True
                say(line)
            else:
                self.last = line or self.last
                say(f"{self.name}: {line}")

    def ask(self, word: bytes) -> None:
        """Say something to its agent; an empty `word`: to end."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            if word:
                self.process.stdin.write(word)
                self.process.stdin.flush()
            else:
                self.process.stdin.close()


def say(line: str) -> None:
    """Print a line whole."""
    os.write(1, f"{line}\n".encode())


def start(
    ssh: Sequence[str], name: str, number: int, count: int, each: int, first: str, command: Sequence[str]
) -> Host:
    """Start the agent of host `number` of `count`, of which `first` has rank 0."""
    kept = {key: value for key, value in os.environ.items() if key in KEPT or key.startswith(OWN)}
    variables = kept | {"WORLD_SIZE": str(count * each), "LOCAL_WORLD_SIZE": str(each), "MASTER_ADDR": first}
    agent = [sys.executable, "-P", "-m", "harness.launch.hosts.agent", name, str(number * each), str(each)]
    words = ["env", *(f"{key}={value}" for key, value in variables.items()), *agent, *command]
    remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
    process = subprocess.Popen(
        [*die_with_parent.prefix(), *ssh, name, remote],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # signals to the group of this process are for it alone
    )
    return Host(name, process)


def watch(hosts: Sequence[Host]) -> int:
    """Wait until all have ended well, or the first one has not; returns the exit code."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        codes = [host.process.poll() for host in hosts]
        for host, code in zip(hosts, codes, strict=True):
            if code:
                host.reader.join(1)
                if not host.explained:
                    when = "lost" if host.ready else "not reached"
                    why = f": {host.last}" if host.last else ""
                    say(f"{LINE}{host.name}: was {when}, launch.ssh ended with exit code {code}{why}")
                return 1
            if not host.ready and code is None and time.monotonic() > deadline:
                say(f"{LINE}{host.name}: did not answer within {ANSWER_S:g} s -> is it up? does launch.ssh reach it?")
                return 1
        if all(code == 0 for code in codes):
            for host in hosts:
                host.reader.join(1)
            return 0
        time.sleep(POLL_S)


def end(hosts: Sequence[Host]) -> None:
    """Have all agents end their ranks, and end those that do not."""
    for host in hosts:
        host.ask(b"")
    deadline = time.monotonic() + END_S
    for host in hosts:
        with suppress(subprocess.TimeoutExpired):
            host.process.wait(max(deadline - time.monotonic(), 0.1))
        host.process.kill()
        host.process.wait()
        host.reader.join(1)


def main(given: str, command: Sequence[str]) -> int:
    """Start the ranks, and wait for their end; returns the exit code."""
    words, hosts = json.loads(given), list[Host]()
    os.environ[CHECKED] = same_checkout.code()
    names = words["hosts"]

    def ask(number: int, frame: object) -> None:
        for host in hosts:
            host.ask(ASK)

    signal.signal(signal.SIGUSR2, ask)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for number, name in enumerate(names):
            first = names[0].rpartition("@")[2]
            hosts.append(start(words["ssh"], name, number, len(names), words["each"], first, command))
        return watch(hosts)
    finally:
        end(hosts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
