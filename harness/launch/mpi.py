"""A real MPI world for forked ranks, so that torch is loaded once.

    host --starts--> mpiexec --starts--> helper 0, helper 1, ...      small processes, which start in milliseconds
      |                                        | PMI socket and environment, over a Unix socket
      |<---------------------------------------'
      '--fork--> rank 0 with helper 0's PMI connection, rank 1 with helper 1's, ...      MPI_Init finds its world

The simpler way is `mpiexec -n P python -m harness.worker ...`, where each rank imports torch. It was measured: a run of
3 steps of the small GPT on 2 cores, both ways in turns, medians. With 2 ranks it takes 9.5 s instead of 9.8 s; with 4
ranks 13.2 to 14.7 s instead of 11.5 to 11.9 s, in pairs 1.23 to 1.26 times as long (2.7 to 3.0 s more); with 8 ranks
24.9 s instead of 16.1 s. The host also knows where a killed rank was (`DistributedSession.last_seen`), which mpiexec
does not.

No file is left, whatever happens: shared memory of the world loses its name as soon as all ranks have it, the Unix
socket is abstract, and the output of mpiexec goes to a file without a name. What a world leaves that is killed with its
host before that, the next one removes. So no rank finalizes MPI, which would wait for ranks that are gone. Only ranks
import mpi4py.
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

from harness.core.problem import Problem
from harness.launch import die_with_parent
from harness.launch.mpi_helper import PMI_NAMES
from harness.launch.signals import blocked

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

HERE = Path(__file__).resolve().parent
INSTALL = "pip install -e '.[mpi]'"
SHARED = ("/dev/shm/mpich", "/dev/shm/ucx")
"""Prefix of the names of mpich's shared memory."""
LOCAL = ("-launcher", "fork", "-rmk", "user", "-hosts", "localhost")
"""All ranks are here, whatever a batch system says."""
FOREIGN = (*PMI_NAMES, "SLURM_", "HYDRA_", "MPIEXEC_")
"""Variables that would make mpiexec start ranks elsewhere, or as a part of another world."""
NO_TOPOLOGY = {"HWLOC_XMLFILE": os.devnull}
"""Of mpiexec: else it writes this machine's topology for its ranks into a file in /tmp, and leaves it when killed. Each
rank finds the topology out by itself."""
RANK_SETTINGS = {"UCX_TCP_MAX_CONN_RETRIES": "255", "MPIR_CVAR_ASYNC_PROGRESS": "0"}
"""Settings of UCX and mpich for a rank: its thread for progress spins; ranks of srun that all connect at once on a busy
machine need more than 25 tries."""
ON_CPUS = {"UCX_TLS": "self,tcp"}
"""Of UCX where ranks have no GPUs, whose memory it reaches by others of its ways: mpich has its own shared memory."""
HELPERS_S = 8.0
"""Within which the helpers must connect; it takes hundredths of a second."""
GRACE_S = 3.0
"""Within which mpiexec ends when its helpers have."""
STARTED_S = 60.0
"""After which each rank of a world has its shared memory, or never will."""


class NoWorld(RuntimeError):
    """MPI could not be started; the message says why, and how to fix it."""


@dataclass(frozen=True)
class PmiConnection:
    """A rank's connection to mpiexec: the variables and the socket (a file descriptor) of the PMI protocol."""

    environment: dict[str, str]
    pmi_socket: int
    helper: socket.socket

    @property
    def rank(self) -> int:
        return int(self.environment["PMI_RANK"])

    def close(self) -> None:
        os.close(self.pmi_socket)
        self.helper.close()


def mpiexec() -> Path:
    """Return the mpiexec of this Python's environment: another MPI's would start ranks that do not find each other."""
    return Path(sys.executable).parent / "mpiexec"


def problems(key: str, value: str, instead: str) -> list[Problem]:
    """Return the problems of MPI on this machine, as problems of `key`; the value `instead` needs no MPI."""
    hint, message = INSTALL, ""
    if find_spec("mpi4py") is None:
        message = "needs mpi4py, which is not installed"
    elif not mpiexec().exists():
        other = shutil.which("mpiexec")
        there = f"{other} is of another MPI than this Python's mpi4py" if other else "there is no mpiexec"
        message = f"needs mpich in the environment of this Python ({mpiexec()}); {there}"
    elif chosen := os.environ.get("MPI4PY_MPIABI"):
        message, hint = f"MPI4PY_MPIABI={chosen} makes mpi4py load another MPI than mpich", "unset MPI4PY_MPIABI"
    return [Problem(key, value, message, ({key: instead},), hint)] if message else []


@contextmanager
def pmi_connections(count: int) -> Iterator[list[PmiConnection]]:
    """The PMI connections of `count` ranks, in their order; mpiexec and its helpers are gone when it is left.

    Raises NoWorld where mpiexec does not start them.
    """
    with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryFile() as output:
        server.bind("")  # the kernel finds a name
        server.listen(count)
        since, connections = time.time(), list[PmiConnection]()
        process = _start_mpiexec(count, server.getsockname()[1:].decode(), output.fileno())
        try:
            connections += _received(server, count, process, output.fileno())
            yield sorted(connections, key=lambda connection: connection.rank)
        except Exception as error:
            if (code := process.poll()) is not None and code < 0:  # a rank that fails ends it by no signal
                error.add_note(f"mpiexec was ended by signal {-code} ({signal.Signals(-code).name}) before that")
            raise
        finally:
            for connection in connections:
                with suppress(OSError):
                    connection.close()
            _end(process)
            remove_orphaned_memory(since)


def _start_mpiexec(count: int, name: str, output: int) -> subprocess.Popen[bytes]:
    """mpiexec with helpers that connect to the abstract socket `name`."""
    helper = [sys.executable, "-S", "-E", str(HERE / "mpi_helper.py"), name]
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    with blocked():
        return subprocess.Popen(
            [*die_with_parent.prefix(), str(mpiexec()), *LOCAL, "-n", str(count), *helper],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=NO_TOPOLOGY | own,
            start_new_session=True,
        )


def _received(
    server: socket.socket, count: int, process: subprocess.Popen[bytes], output: int
) -> Iterator[PmiConnection]:
    """The PMI connections, as the helpers send them."""
    deadline = time.monotonic() + HELPERS_S
    server.settimeout(0.05)
    for number in range(count):
        helper = None
        while helper is None:
            try:
                helper = _same_user(server.accept()[0])
            except TimeoutError:
                if process.poll() is not None or time.monotonic() > deadline:
                    lines = os.pread(output, 1 << 16, 0).decode(errors="replace").strip().splitlines()
                    why = lines[-1] if lines else f"{number} of {count} had started after {HELPERS_S:g} s"
                    raise NoWorld(f"{mpiexec()} started no {count} ranks: {why} -> {INSTALL}") from None
        helper.settimeout(HELPERS_S)
        message, sockets, _, _ = socket.recv_fds(helper, 1 << 16, 1)
        if not sockets:
            raise NoWorld(f"{mpiexec()} is of another MPI than mpich, which mpi4py is for here -> {INSTALL}")
        yield PmiConnection(json.loads(message), sockets[0], helper)


def _same_user(helper: socket.socket) -> socket.socket | None:
    """The connection, if it is one of this user's processes; others are refused, since the socket has no owner."""
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


def join_world(rank: int, connections: Sequence[PmiConnection], device: str) -> Intracomm:
    """In a forked rank: become rank `rank` of the world, with a torch device. Several threads may send and receive its
    messages.

    Raises NoWorld where MPI sees another world.
    """
    for connection in connections:
        connection.helper.close()
        if connection.rank != rank:
            os.close(connection.pmi_socket)
    pmi = connections[rank].environment | {"PMI_FD": str(connections[rank].pmi_socket)}
    os.environ |= _settings(device) | pmi
    return _world(len(connections), "mpiexec")


def join_step_world(count: int, device: str) -> Intracomm:
    """In a rank that srun has started with --mpi=pmi2: become one of the world of `count`; raises as `join_world`."""
    os.environ |= _settings(device)
    return _world(count, "srun")


def _settings(device: str) -> dict[str, str]:
    return RANK_SETTINGS | (ON_CPUS if device == "cpu" else {})


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
        unlink_own_memory()
    return world


def remove_orphaned_memory(since: float) -> None:
    """Remove this user's shared memory of MPI that no process has: of ranks that died before it lost its name.

    It was created after `since`, by ranks that have just ended, or more than `STARTED_S` ago: by a world that was
    killed with its host.
    """
    there = [path for path in Path("/dev/shm").glob("*") if str(path).startswith(SHARED)]
    if not there:
        return
    processes = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    in_use = {path for process in processes for path in _shared_memory(process)}
    for path in there:
        with suppress(OSError):
            stat = path.stat()
            starting = since - 1 > stat.st_ctime > time.time() - STARTED_S
            if str(path) not in in_use and stat.st_uid == os.getuid() and not starting:
                path.unlink()


def _shared_memory(process: int) -> set[str]:
    """The names of the MPI's shared memory that a process has mapped."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        paths = {line[line.index("/") :] for line in lines if "/" in line}
        return {path for path in paths if path.startswith(SHARED)}
    return set()


def unlink_own_memory() -> None:
    """Remove the names of this process's shared memory: the kernel frees it when the last process that has it ends."""
    for path in _shared_memory(os.getpid()):
        with suppress(OSError):
            os.unlink(path)
