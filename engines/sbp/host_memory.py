"""Small tensors of ranks on one host, gathered through memory that they share: a wait for others, and no message.

    rank 0    writes its part |a|, then its counter 7        counters  7 7      of the gathering that a rank is in
    rank 1    writes its part |b|, then its counter 7        half 0    . .      a part for each rank
    all       wait until every counter is 7, read |a|b|      half 1    a b      of gatherings with odd numbers

Who is in gathering 8 shows that all have read what was gathered in 7 only once it is in 9; so there are two halves, in
turns. Parts are read after the counter that follows them: processors of the x86 family show each other their stores in
the order of the program (Intel's manual, volume 3, section 9.2.2), others need not, and have gloo instead.

The memory has no name: a member opens it through the process that made it, and it is gone with the last of them,
however these end.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from harness.runtime.collectives import patience

LARGEST = 1 << 16
"""Bytes of the largest part. Larger ones take longer to copy than a message's wait."""
ORDERED = ("x86_64", "amd64")
"""Processors that show stores in the order of the program."""
LINE = 64
"""Bytes between two counters: each has a cache line of its own."""
YIELDING_S = 1e-3
"""For so long a core is given to whoever waits for one between two looks, and else kept: to sleep and to wake up takes
longer than most waits, and another rank may be what waits for this core."""
IDLE_S, IDLE_SHARE = (1e-6, 2e-4), 1 / 8
"""Between two later looks: such a share of what it has waited already, within these bounds."""
LOOK_S = 0.05
"""After which a wait looks whether the others still run."""
TOKEN = 16
"""Bytes at the end by which a member knows that it has opened the right memory."""


class HostMemory:
    """Memory of a group's members, of which this one is number `own`; `ends` are files of the other members' processes
    that can be read once these have ended."""

    def __init__(self, memory: mmap.mmap, own: int, members: int, ends: Sequence[int]) -> None:
        self.own, self.members, self.number, self.inside = own, members, 0, False
        self.counters = memoryview(memory)[: members * LINE].cast("Q")
        parts = torch.frombuffer(memory, dtype=torch.uint8, offset=members * LINE, count=2 * members * LARGEST)
        self.halves = parts.view(2, members, LARGEST)
        self.places = [member * LINE // 8 for member in range(members)]
        self.others = [place for member, place in enumerate(self.places) if member != own]
        self.views: dict[tuple[torch.dtype, torch.Size], list[tuple[Tensor, Tensor]]] = {}
        self.ends = select.poll()
        for file in ends:
            self.ends.register(file, select.POLLIN)

    @classmethod
    def shared(cls, group: Any) -> Self | None:
        """Return memory that all members of a process group share; None to all of them where they are on several
        hosts, or a processor or system cannot. Collective over the group."""
        own, count = dist.get_rank(group), dist.get_world_size(group)
        size = count * LINE + 2 * count * LARGEST
        token = os.urandom(TOKEN)
        file = _made(size, token) if own == 0 else None
        said = _said(group, (_host(), os.getpid(), file, token))
        here = {host for host, *_ in said} == {_host()}
        _, first, its_file, its_token = said[0]
        memory = _opened(first, its_file, its_token, size) if here else None
        ends = _ends([process for _, process, *_ in said if process != os.getpid()]) if memory else None
        everyone = all(_said(group, ends is not None))
        if file is not None:
            os.close(file)
        if memory and ends is not None and everyone:
            return cls(memory, own, count, ends)
        for one in ends or ():
            os.close(one)
        return None

    def gathered(self, x: Tensor) -> Tensor:
        """Return the tensors of all members, (members, *shape), until the next call: each has one of this shape and
        dtype, of at most `LARGEST` bytes. Raises ConnectionError where another member has ended, TimeoutError after
        `patience`, RuntimeError where an error has ended a gathering before."""
        if self.inside:
            raise RuntimeError("an error has ended a gathering of statistics: the members disagree which is next")
        self.inside = True
        self.number += 1
        mine, everyone = self._views(x)[self.number & 1]
        mine.copy_(x)
        self.counters[self.places[self.own]] = self.number
        for place in self.others:
            if self.counters[place] < self.number:
                self._wait(place)
        self.inside = False
        return everyone

    def _views(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The own part, and those of all members, in each half."""
        key = x.dtype, x.shape
        if key not in self.views:
            with torch.inference_mode(False):  # later gatherings may be training
                parts = [half[:, : x.nbytes].view(x.dtype) for half in self.halves]
                shaped = [one.view(self.members, *x.shape) for one in parts]
                self.views[key] = [(one[self.own], one) for one in shaped]
        return self.views[key]

    def _wait(self, place: int) -> None:
        """Until another member is in this gathering, too."""
        counters, number = self.counters, self.number
        least, most = IDLE_S
        began = looked = time.monotonic()
        while counters[place] < number and time.monotonic() - began < YIELDING_S:
            os.sched_yield()
        while counters[place] < number:
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                if self.ends.poll(0) and counters[place] < number:
                    raise ConnectionError("connection closed: a rank of this host has ended")
            if now - began > patience().total_seconds():
                raise TimeoutError(f"a rank has waited {patience()} for the statistics of another one")
            time.sleep(min(max((now - began) * IDLE_SHARE, least), most))


def _said(group: Any, what: Any) -> list[Any]:
    """What each member says."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, what, group=group)
    return found


def _host() -> str:
    """Return what processes have in common that find each other by their numbers: the system's start, a container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as start:
            return start.read() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{platform.node()} {os.getpid()}"


def _made(size: int, token: bytes) -> int | None:
    """Return a file without a name, of zeros and a token after them; None where there is none of that kind."""
    if platform.machine().lower() not in ORDERED or not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create("regatta")
        os.pwrite(file, token, size)
    except OSError:
        return None
    return file


def _ends(processes: Sequence[int]) -> list[int] | None:
    """Return a file of each process that can be read once it has ended; None where the kernel has none."""
    try:
        return [os.pidfd_open(process) for process in processes]
    except OSError:
        return None


def _opened(process: int, file: int | None, token: bytes, size: int) -> mmap.mmap | None:
    """Map the file of a process; None where there is none, or it is not this one."""
    if file is None:
        return None
    try:
        here = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    except OSError:
        return None
    try:
        found = os.pread(here, TOKEN, size) == token
        return mmap.mmap(here, size) if found else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(here)
