"""The clocks of several hosts, compared. `time.perf_counter` counts from when a host has started: days apart.

    rank 0            t0 --.              .--> t1        its clock at the middle of the way there and back
    another host            '--> t --here--'             offset = (t0 + t1) / 2 - t, of the quickest of several rounds

What the ranks of one host say needs no correction: they have one clock.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 20
EVERY = 100
"""Steps after which clocks are compared again: they drift apart by some millionths."""


def host_clock() -> str:
    """Return what the processes have in common that share a clock: the start of the kernel, and a time namespace."""
    found = [platform.node()]
    with suppress(OSError):
        found = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        found.append(os.readlink("/proc/self/ns/time"))
    return " ".join(found)


class HostClocks:
    """How far this rank's clock is from that of rank 0. Every rank has one."""

    def __init__(self) -> None:
        self._hosts: list[Any] = []
        self._offset_s, self._compared = 0.0, 0

    def offset_s(self, step: int) -> float:
        """Return the seconds to add to this rank's clock. Collective before the first `step`, and where it is time."""
        if not self._hosts:
            self._hosts = [None] * dist.get_world_size()
            dist.all_gather_object(self._hosts, host_clock())
        elif step < self._compared + EVERY:
            return self._offset_s
        self._offset_s, self._compared = compare(self._hosts), step
        return self._offset_s


def compare(hosts: Sequence[str]) -> float:
    """Return the seconds to add to this rank's clock; `hosts[r]` is the clock of rank r. Collective.

    The first rank of each host speaks for it.
    """
    others = [host for host in dict.fromkeys(hosts) if host != hosts[0]]
    offsets = torch.zeros(len(others), dtype=torch.float64)
    rank = dist.get_rank()
    for number, host in enumerate(others):
        speaker = hosts.index(host)
        if rank == 0:
            offsets[number] = _asked(speaker)
        elif rank == speaker:
            _answer()
    if others:
        dist.broadcast(offsets, 0)
    return dict(zip(others, offsets.tolist(), strict=True)).get(hosts[rank], 0.0)


def _asked(rank: int) -> float:
    """Return the offset of another rank."""
    there = torch.zeros(1, dtype=torch.float64)
    rounds = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        dist.send(there, rank)
        dist.recv(there, rank)
        end_s = time.perf_counter()
        rounds.append((end_s - start_s, (start_s + end_s) / 2 - float(there)))
    return min(rounds)[1]


def _answer() -> None:
    here = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        dist.recv(here, 0)
        here[0] = time.perf_counter()
        dist.send(here, 0)
