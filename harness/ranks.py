"""Ranks: a process for each device, forked from one that has loaded torch, in one torch.distributed group.

    host (torch loaded) --fork--> rank 0 --|
                        --fork--> rank 1 --|-- all_reduce, send, recv ...
    what rank 0 returns <----------'

The first rank that fails ends all; its error is the host's. No rank outlives the host.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness import allocation, group, joined, mpi, oom
from harness.meeting import Meeting
from harness.mpi import Wires
from harness.orphan import PR_SET_PDEATHSIG

T = TypeVar("T")
HINDSIGHT_S = 0.2
"""How long the host looks, when a rank has failed, for another one that had gone before."""
GRACE_S = 1.0
"""How long the host waits for the message of a rank that has ended."""


class RankLost(Exception):
    """Rank `rank` ended without a word."""

    rank = 0


class RankKilled(RankLost, RuntimeError):
    """A rank was killed from outside."""


class RankOutOfMemory(RankKilled, MemoryError):
    """A rank was killed by the kernel for want of memory."""


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


def first() -> bool:
    """Whether this process is the one that reports: rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def each(
    count: int, work: Callable[[], T], devices: Sequence[str], with_mpi: bool = False, meeting: Meeting | None = None
) -> T:
    """Do `work` in `count` ranks; what it returned in rank 0. `devices[r]` is the torch device of rank r.

    With `with_mpi` they are an MPI world, too (`harness.mpi`). Raises the first error of any rank (with its traceback),
    `RankKilled` or `RankDied` for one that ended without. All ranks have ended when this function is left. They meet by
    a file that has no name, so that none stays behind, however this process ends.

    With a `meeting` none is forked: this process is one of `count` that srun has started (`harness.joined`).
    """
    if meeting:
        return joined.work(count, work, devices[meeting.rank], with_mpi, meeting)
    worlds: AbstractContextManager[list[Wires]] = mpi.wired(count) if with_mpi else nullcontext([])
    with worlds as wires, open(os.memfd_create("group"), "rb") as meet:
        fork = get_context("fork")
        ranks: list[tuple[BaseProcess, Connection]] = []
        kills = oom.kills()
        gc.freeze()  # else a rank's first collection copies every page of what it has from here
        try:
            for rank in range(count):
                here, there = fork.Pipe(duplex=False)
                process: BaseProcess = fork.Process(
                    target=_rank,
                    args=(rank, count, work, devices[rank], meet.fileno(), there, os.getpid(), wires),
                    daemon=True,
                )
                process.start()
                there.close()
                ranks.append((process, here))
            result: T = _collected(ranks, kills)
            return result
        finally:
            gc.unfreeze()
            for process, here in ranks:
                process.kill()
                process.join()
                here.close()


def _rank(
    rank: int, count: int, work: Callable[[], Any], device: str, meet: int, there: Connection, host: int,
    wires: Sequence[Wires],
) -> None:  # fmt: skip
    """The life of a rank: it sends what `work` returned, or how it failed, and is gone.

    A rank that fails tells before its connections break, so that its error comes before those that follow from it.
    """
    _die_with(host)
    for number in (signal.SIGINT, signal.SIGHUP, *([] if allocation.found() else [signal.SIGTERM])):  # see harness.rank
        signal.signal(number, signal.SIG_DFL)
    code = 0
    try:
        local = (torch.device(device).index or 0) if device.startswith("cuda") else rank
        group.join(rank, count, device, local, init_method=f"file:///proc/self/fd/{meet}")
        if wires:
            mpi.enter(rank, wires)
        result = work()
        there.send_bytes(pickle.dumps(result if rank == 0 else None))
        dist.barrier()  # none leaves while another one still has messages for it
        dist.destroy_process_group()
    except BaseException as error:
        code = 1
        traceback.print_exc()
        with suppress(OSError):
            there.send_bytes(_packed(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what was inherited from the host is not the rank's to tidy up


def _die_with(host: int) -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != host:
        os._exit(1)


def _packed(error: BaseException) -> bytes:
    trace = traceback.format_exc()
    try:
        data = pickle.dumps(_Failed(error, trace))
        pickle.loads(data)  # some errors can be packed, but not unpacked
        return data
    except Exception:
        told = RankDied(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        return pickle.dumps(_Failed(told, trace))


def _collected(ranks: Sequence[tuple[BaseProcess, Connection]], kills: int | None) -> Any:
    """Wait for all; the first message of a failure, or a rank that ended without one, ends the waiting.

    The kernel had killed `kills` processes when they started.
    """
    open_: dict[Connection, int] = {here: number for number, (_, here) in enumerate(ranks)}
    result = None
    while open_:
        ready = [one for one in wait(list(open_)) if isinstance(one, Connection)]
        for here in ready:
            number = open_.pop(here)
            try:
                message = pickle.loads(here.recv_bytes())
            except EOFError:
                raise _ended(number, ranks[number][0], kills) from None
            if isinstance(message, _Failed):
                lost = _silent(open_)
                if lost is not None:
                    raise _ended(lost, ranks[lost][0], kills)
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


def _silent(open_: dict[Connection, int]) -> int | None:
    """A rank that ended without a word just before another one failed: that one has lost its connection to it."""
    deadline = time.monotonic() + HINDSIGHT_S
    while open_ and (left := deadline - time.monotonic()) > 0:
        for here in wait(list(open_), left):
            assert isinstance(here, Connection)
            number = open_.pop(here)
            try:
                here.recv_bytes()
            except EOFError:
                return number
    return None


def _ended(number: int, process: BaseProcess, kills: int | None) -> Exception:
    """What the exit of a rank that sent nothing tells."""
    process.join(GRACE_S)
    code = process.exitcode
    error: RankLost
    if code == -signal.SIGKILL:
        status, told = oom.verdict(f"rank {number}", kills)
        error = RankOutOfMemory(told) if status == "oom" else RankKilled(told)
    elif code is not None and code < 0:
        error = RankDied(f"rank {number} ended by signal {-code} ({signal.Signals(-code).name})")
    else:
        error = RankDied(f"rank {number} ended with exit code {code}, its output tells more")
    error.rank = number
    return error
