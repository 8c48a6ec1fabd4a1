"""Ranks: a process for each device, forked from one that has loaded torch, in one torch.distributed group.

    host (torch loaded) --fork--> rank 0 --|
                        --fork--> rank 1 --|-- all_reduce, send, recv ...
    what rank 0 returns <----------'

The first rank that fails ends all; its error is raised in the host. No rank outlives the host.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.host import ending_signals, oom_killer
from harness.interfaces import Session
from harness.launch import mpi, process_group, signal_watcher, slurm_ranks
from harness.launch.die_with_parent import die_with
from harness.launch.failure import LOST_PEER
from harness.launch.mpi import PmiConnection
from harness.launch.signals import ENDING
from harness.launch.slurm_ranks import Rendezvous
from harness.runtime.collectives import patience
from harness.runtime.distributed_session import DistributedSession

T = TypeVar("T")
HERE = "127.0.0.1"
SILENT_S = 0.2
"""Seconds in which the host, after a rank has failed, looks for another one that had ended before without a message."""
GRACE_S = 1.0
"""Seconds that the host waits for the message of a rank that has ended."""


class RankLost(Exception):
    """Rank `rank` ended without a message."""

    rank = 0


class RankKilled(RankLost, RuntimeError):
    """A rank was killed from outside."""


class RankOutOfMemory(RankKilled, MemoryError):
    """A rank was killed by the kernel's OOM killer."""


class RankDied(RankLost, RuntimeError):
    """A rank ended by itself, or by another signal."""


class _Remote(Exception):
    """The traceback of a rank's error, as the cause of the same error in the host."""

    def __str__(self) -> str:
        return f"in rank {self.args[0]}:\n{self.args[1]}"


@dataclass(frozen=True)
class _Failed:
    error: BaseException
    trace: str


def run_session_on_ranks(
    session: AbstractContextManager[Session],
    function: Callable[[Session], T],
    count: int,
    devices: Sequence[str],
    with_mpi: bool = False,
    rendezvous: Rendezvous | None = None,
) -> T:
    """Enter the session of a multi-process engine in each of `count` ranks and apply `function` to it.

    Returns what rank 0's call returned; raises as `run_on_ranks`, with a note of where a killed rank was in its step.
    With a `rendezvous` no rank is forked: this process is itself one of those that srun has started.
    """

    if isinstance(session, DistributedSession):
        signal_watcher.describe(session.activity)

    def enter_and_apply() -> T:
        with session as entered:
            return function(entered)

    if rendezvous:
        return slurm_ranks.run_in_step(count, enter_and_apply, devices[rendezvous.rank], with_mpi, rendezvous)
    try:
        return run_on_ranks(count, enter_and_apply, devices, with_mpi)
    except RankLost as error:
        if isinstance(session, DistributedSession):
            error.add_note(session.last_seen(error.rank))
        raise


def run_on_ranks(count: int, function: Callable[[], T], devices: Sequence[str], with_mpi: bool = False) -> T:
    """Call `function` in `count` forked ranks; returns what it returned in rank 0.

    `devices[r]` is the torch device of rank r. With `with_mpi` the ranks are also an MPI world (`harness.launch.mpi`).
    Raises the first error of any rank, with its traceback, and `RankKilled` or `RankDied` for a rank that ended without
    one; RuntimeError where this process uses a GPU already, which those forked from it could not. All ranks have ended
    when this function returns or raises. They meet at a port of this machine that is open before they begin.
    """
    if devices[0] != "cpu" and torch.cuda.is_initialized():
        raise RuntimeError(
            "this process has started CUDA, which a process that is forked from it cannot use -> no GPU may be used "
            "where the model's file is imported"
        )
    worlds: AbstractContextManager[list[PmiConnection]] = mpi.pmi_connections(count) if with_mpi else nullcontext([])
    with worlds as connections, socket.create_server((HERE, 0), backlog=count) as rendezvous:
        fork = get_context("fork")
        ranks: list[tuple[BaseProcess, Connection]] = []
        kills = oom_killer.kill_count()
        gc.freeze()  # else a rank's first garbage collection copies every page that it shares with the host
        try:
            for rank in range(count):
                from_rank, to_host = fork.Pipe(duplex=False)
                process: BaseProcess = fork.Process(
                    target=_run_rank,
                    args=(
                        rank,
                        count,
                        function,
                        devices[rank],
                        rendezvous,
                        to_host,
                        os.getpid(),
                        connections,
                    ),
                    daemon=True,
                )
                process.start()
                to_host.close()
                signal_watcher.forked(rank, process.pid or 0)
                ranks.append((process, from_rank))
            result: T = _collected(ranks, kills)
            return result
        finally:
            gc.unfreeze()
            for process, from_rank in ranks:
                process.kill()
                process.join()
                from_rank.close()


def _run_rank(
    rank: int,
    count: int,
    function: Callable[[], Any],
    device: str,
    rendezvous: socket.socket,
    to_host: Connection,
    host: int,
    connections: Sequence[PmiConnection],
) -> None:
    """The life of a rank: it sends what `function` returned, or its error, and exits.

    A rank that fails sends its error before its connections break, so that it arrives before those that follow from it.
    """
    die_with(host)
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal_watcher.watch_in_rank(rank)
    code = 0
    try:
        process_group.join(rank, count, device, rank, store=_store(rank, count, rendezvous))
        if connections:
            mpi.join_world(rank, connections, device)
        result = function()
        to_host.send_bytes(pickle.dumps(result if rank == 0 else None))
        dist.barrier()  # no rank exits while another one still has messages for it
        dist.destroy_process_group()
    except BaseException as error:
        code = 1
        traceback.print_exc()
        with suppress(OSError):
            to_host.send_bytes(_packed(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what was inherited from the host is not the rank's to clean up


def _store(rank: int, count: int, rendezvous: socket.socket) -> dist.TCPStore:
    """The store of all ranks, which rank 0 serves at the port that is open already: the others wait there for it."""
    port = rendezvous.getsockname()[1]
    if rank == 0:
        return dist.TCPStore(HERE, port, count, True, patience(), False, master_listen_fd=rendezvous.detach())
    rendezvous.close()
    return dist.TCPStore(HERE, port, count, False, patience())


def _packed(error: BaseException) -> bytes:
    trace = traceback.format_exc()
    try:
        data = pickle.dumps(_Failed(error, trace))
        pickle.loads(data)  # some errors can be packed, but not unpacked
        return data
    except Exception:
        plain = RankDied(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            plain.add_note(note)
        return pickle.dumps(_Failed(plain, trace))


def _collected(ranks: Sequence[tuple[BaseProcess, Connection]], kills: int | None) -> Any:
    """Wait for all ranks; the first error that arrives, or a rank that ended without a message, ends the waiting.

    The OOM killer had ended `kills` processes when they started.
    """
    open_: dict[Connection, int] = {from_rank: number for number, (_, from_rank) in enumerate(ranks)}
    result = None
    while open_:
        ready = [pipe for pipe in wait(list(open_)) if isinstance(pipe, Connection)]
        for from_rank in ready:
            number = open_.pop(from_rank)
            try:
                message = pickle.loads(from_rank.recv_bytes())
            except EOFError:
                raise _ended(number, ranks[number][0], kills) from None
            if isinstance(message, _Failed):
                failed = {number: message}
                lost = _silent(open_, failed)
                if lost is not None:
                    raise _ended(lost, ranks[lost][0], kills)
                number, message = _cause(failed)
                raise message.error from _Remote(number, message.trace)
            result = message if number == 0 else result
    ending = {process.sentinel: number for number, (process, _) in enumerate(ranks)}
    while ending:
        for sentinel in wait(list(ending)):
            assert isinstance(sentinel, int)
            number = ending.pop(sentinel)
            ranks[number][0].join()
            if ranks[number][0].exitcode:
                raise _ended(number, ranks[number][0], kills)
    return result


def _cause(failed: Mapping[int, _Failed]) -> tuple[int, _Failed]:
    """The first failure of a rank that has not just lost its connection to another one: both may arrive at once."""
    causes = (one for one in failed.items() if not LOST_PEER.search(str(one[1].error)))
    return next(causes, next(iter(failed.items())))


def _silent(open_: dict[Connection, int], failed: dict[int, _Failed]) -> int | None:
    """A rank that ended without a message just before another one failed, which had lost its connection to it. Ranks
    that fail meanwhile are added to `failed`."""
    deadline = time.monotonic() + SILENT_S
    while open_ and (left := deadline - time.monotonic()) > 0:
        for from_rank in wait(list(open_), left):
            assert isinstance(from_rank, Connection)
            number = open_.pop(from_rank)
            try:
                message = pickle.loads(from_rank.recv_bytes())
            except EOFError:
                return number
            if isinstance(message, _Failed):
                failed[number] = message
    return None


def _ended(number: int, process: BaseProcess, kills: int | None) -> Exception:
    """The error for a rank that ended without a message, by its exit code."""
    process.join(GRACE_S)
    code = process.exitcode
    error: RankLost
    if code == -signal.SIGKILL:
        status, reason = oom_killer.explain_kill(f"rank {number}", kills)
        error = RankOutOfMemory(reason) if status == "oom" else RankKilled(reason)
    elif code is not None and code < 0:
        error = RankDied(ending_signals.explain(f"rank {number}", -code))
    else:
        error = RankDied(f"rank {number} ended with exit code {code}, see its output")
    error.rank = number
    return error
