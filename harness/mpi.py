"""A real MPI world for ranks that are forked, so that torch is loaded once.

    host --starts--> mpiexec --starts--> helper 0, helper 1, ...      small processes, there in milliseconds
      |                                        | its wires: PMI socket and environment, over a Unix socket
      |<---------------------------------------'
      '--fork--> rank 0 with the wires of helper 0, rank 1 with those of helper 1, ...    MPI_Init finds its world

Shared memory of the world is nameless as soon as all ranks have it, the socket is one of Linux's abstract ones and what
mpiexec says goes into a file without a name: whatever happens later, no file stays behind; what a world leaves that is
killed with its host before that, the next one sweeps. So no rank finalizes MPI, which would wait for ranks that are no
more. Only ranks import mpi4py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from harness import orphan
from harness.mpi_helper import NAMES
from harness.problem import Problem

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

HERE = Path(__file__).resolve().parent
INSTALL = "pip install -e '.[mpi]'"
SHARED = ("/dev/shm/mpich", "/dev/shm/ucx")
"""How the names of mpich's shared memory begin."""
LOCAL = ("-launcher", "fork", "-rmk", "user", "-hosts", "localhost")
"""All ranks are here, whatever a batch system says."""
FOREIGN = (*NAMES, "SLURM_", "HYDRA_", "MPIEXEC_")
"""What would make mpiexec start them elsewhere, or as a part of another world."""
OWN = {"UCX_TLS": "self,tcp", "UCX_TCP_MAX_CONN_RETRIES": "255", "MPIR_CVAR_ASYNC_PROGRESS": "0"}
"""In ranks: mpich has shared memory of its own; its thread for progress spins; ranks of srun that all connect at
once on a busy machine need more than 25 tries."""
SOON_S = 8.0
"""Within which the helpers must have come; it takes hundredths of a second."""
GRACE_S = 3.0
"""Within which mpiexec ends when its helpers have."""
OLD_S = 60.0
"""After which each rank of a world has its shared memory, or never will."""


class NoWorld(RuntimeError):
    """MPI could not be started; the message says why, and what mends it."""


@dataclass(frozen=True)
class Wires:
    """What connects a rank with mpiexec."""

    environment: dict[str, str]
    pmi: int
    helper: socket.socket

    @property
    def rank(self) -> int:
        return int(self.environment["PMI_RANK"])

    def close(self) -> None:
        os.close(self.pmi)
        self.helper.close()


def mpiexec() -> Path:
    """That of this Python's own environment: another MPI's would start ranks that know nothing of each other."""
    return Path(sys.executable).parent / "mpiexec"


def problems(key: str, instead: str) -> list[Problem]:
    """What keeps MPI from working here, as a problem of `key`; `instead` does without it."""
    mend, found = f"{INSTALL}, or {instead}", ""
    if find_spec("mpi4py") is None:
        found = "needs mpi4py, which is not installed"
    elif not mpiexec().exists():
        other = shutil.which("mpiexec")
        there = f"{other} is of another MPI than this Python's mpi4py" if other else "there is no mpiexec"
        found = f"needs mpich beside this Python ({mpiexec()}); {there}"
    elif chosen := os.environ.get("MPI4PY_MPIABI"):
        found, mend = f"MPI4PY_MPIABI={chosen} makes mpi4py load another MPI than mpich", "unset MPI4PY_MPIABI"
    return [Problem(key, found, mend)] if found else []


@contextmanager
def wired(count: int) -> Iterator[list[Wires]]:
    """The wires of `count` ranks, in their order; mpiexec and its helpers are gone when it is left.

    Raises NoWorld where mpiexec does not start them.
    """
    with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryFile() as said:
        server.bind("")  # the kernel finds a name
        server.listen(count)
        since, found = time.time(), list[Wires]()
        process = _start(count, server.getsockname()[1:].decode(), said.fileno())
        try:
            found += _arrived(server, count, process, said.fileno())
            yield sorted(found, key=lambda one: one.rank)
        finally:
            for one in found:
                with suppress(OSError):
                    one.close()
            _end(process)
            sweep(since)


def _start(count: int, name: str, said: int) -> subprocess.Popen[bytes]:
    command = [str(mpiexec()), *LOCAL, "-n", str(count), sys.executable, "-S", "-E", str(HERE / "mpi_helper.py"), name]
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return subprocess.Popen(
        [*orphan.prefix(), *command], stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=own,
        start_new_session=True,
    )  # fmt: skip


def _arrived(server: socket.socket, count: int, process: subprocess.Popen[bytes], said: int) -> Iterator[Wires]:
    """The helpers' wires, as they come. Others than this user's processes are sent away: a name has no owner."""
    deadline = time.monotonic() + SOON_S
    server.settimeout(0.05)
    for number in range(count):
        helper = None
        while helper is None:
            try:
                helper = _own(server.accept()[0])
            except TimeoutError:
                if process.poll() is not None or time.monotonic() > deadline:
                    words = os.pread(said, 1 << 16, 0).decode(errors="replace").strip().splitlines()
                    why = words[-1] if words else f"{number} of {count} had come after {SOON_S:g} s"
                    raise NoWorld(f"{mpiexec()} started no {count} ranks: {why} -> {INSTALL}") from None
        helper.settimeout(SOON_S)
        message, wires, _, _ = socket.recv_fds(helper, 1 << 16, 1)
        if not wires:
            raise NoWorld(f"{mpiexec()} is of another MPI than mpich, which mpi4py is for here -> {INSTALL}")
        yield Wires(json.loads(message), wires[0], helper)


def _own(helper: socket.socket) -> socket.socket | None:
    """The connection, if it is one of this user's."""
    _, user, _ = struct.unpack("3i", helper.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user == os.getuid():
        return helper
    helper.close()
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def enter(rank: int, wires: Sequence[Wires]) -> Intracomm:
    """In a forked rank: become rank `rank` of the world. Its messages may be sent and received by several threads.

    Raises NoWorld where MPI sees another world.
    """
    for one in wires:
        one.helper.close()
        if one.rank != rank:
            os.close(one.pmi)
    os.environ |= OWN | wires[rank].environment | {"PMI_FD": str(wires[rank].pmi)}
    return _world(len(wires), "mpiexec")


def enter_step(count: int) -> Intracomm:
    """In a rank that srun has started with --mpi=pmi2: become one of the world of `count`; else as `enter`."""
    os.environ |= OWN
    return _world(count, "srun")


def _world(count: int, starter: str) -> Intracomm:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    world = MPI.COMM_WORLD
    if world.size != count:
        name = " ".join(map(str, MPI.get_vendor()))
        raise NoWorld(f"MPI ({name}) sees a world of {world.size}, {starter} started {count} -> {INSTALL}")
    world.Barrier()
    if os.environ.get("MPI_LOCALRANKID" if starter == "mpiexec" else "SLURM_LOCALID", "0") == "0":
        unname()
    return world


def sweep(since: float) -> None:
    """Remove this user's shared memory that no process has: of ranks that died before it was nameless.

    It was made after `since`, by those just ended, or is older than any start takes: a world that was killed with its
    host, which could not remove it.
    """
    there = [path for path in Path("/dev/shm").glob("*") if str(path).startswith(SHARED)]
    if not there:
        return
    known = [number for number in os.listdir("/proc") if number.isdecimal()]
    held = {path for number in known for path in _shared_of(int(number))}
    for path in there:
        with suppress(OSError):
            made = path.stat()
            begins = since - 1 > made.st_ctime > time.time() - OLD_S
            if str(path) not in held and made.st_uid == os.getuid() and not begins:
                path.unlink()


def _shared_of(process: int) -> set[str]:
    """The names of the shared memory that a process has."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        paths = {line[line.index("/") :] for line in lines if "/" in line}
        return {path for path in paths if path.startswith(SHARED)}
    return set()


def unname() -> None:
    """Remove the names of the shared memory that this process has: it goes when the last one that has it does."""
    for path in _shared_of(os.getpid()):
        with suppress(OSError):
            os.unlink(path)
