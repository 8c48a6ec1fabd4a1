"""A rank that srun has started: it joins the others by itself, where `harness.launch.forked_ranks` would fork it.

    rank 0: TCPStore on a free port --> RUN_DIR/rendezvous.json --> rank 1, 2, ...: the same store

Rank 0 opens the store and writes its address into the run's folder. Nothing depends on names of nodes, which need not
resolve: an address is the one from which a node sees the parent's. The parent follows the ranks by files in the run's
folder, and by what srun prints about their end.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore

from harness.core import files
from harness.core.problem import CannotRun, Problem
from harness.core.run_files import RENDEZVOUS
from harness.launch import mpi, process_group

T = TypeVar("T")


def run_in_step(count: int, function: Callable[[], T], device: str, with_mpi: bool, rendezvous: Rendezvous) -> T:
    """Call `function` as one of `count` ranks; returns what it returned in rank 0. Every other rank exits here."""
    if rendezvous.count != count:
        message = f"is not the number of ranks of the plan, {count}"
        hint = "start run.py: it starts the ranks"
        raise CannotRun([Problem("SLURM_STEP_NUM_TASKS", rendezvous.count, message, hint=hint)])
    process_group.join(rendezvous.rank, count, device, rendezvous.local, store=rendezvous.store())
    if with_mpi:
        mpi.join_step_world(count)
    result = function()
    dist.barrier()  # no rank exits while another one still has messages for it
    dist.destroy_process_group()
    if rendezvous.rank:
        exit_now(0)
    return result


def exit_now(code: int) -> NoReturn:
    """Exit without clean-up: libraries would wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


PARENT = "SLURM_LAUNCH_NODE_IPADDR"
"""The address of the node where srun runs, as the other nodes see it."""
GLOO = "GLOO_SOCKET_IFNAME"
LATE_S = 180.0
"""Seconds after the first rank in which all others must start: all load torch from the same disk."""
LOOK_S = 0.05
SIOCGIFADDR = 0x8915


class NoRendezvous(RuntimeError):
    """The ranks did not find each other; the message says how to fix it."""


@dataclass(frozen=True)
class Rendezvous:
    """The file in a run's folder by which the ranks of one Slurm step find rank 0.

    `token` is from the parent, which may start several steps.
    """

    folder: Path
    token: str

    @property
    def rank(self) -> int:
        return int(os.environ["SLURM_PROCID"])

    @property
    def local(self) -> int:
        """The number of this rank among those of its node."""
        return int(os.environ["SLURM_LOCALID"])

    @property
    def count(self) -> int:
        return int(os.environ["SLURM_STEP_NUM_TASKS"])

    @property
    def _key(self) -> str:
        return f"{self.token}.{os.environ['SLURM_STEP_ID']}"

    def store(self) -> TCPStore:
        """The store that all ranks have; `torch.distributed` gets gloo's network from it, too. Raises NoRendezvous."""
        here = address()
        if device := interface(here):
            os.environ.setdefault(GLOO, device)  # gloo would resolve the host's name, often to 127.0.1.1
        late = timedelta(seconds=LATE_S)
        if self.rank == 0:
            store = TCPStore(here, 0, self.count, True, late, wait_for_workers=False)
            place = {"key": self._key, "address": here, "port": store.port}
            files.write_text(self.folder / RENDEZVOUS, json.dumps(place))
            return store
        there, port = self._place()
        return TCPStore(there, port, self.count, False, late)

    def _place(self) -> tuple[str, int]:
        """The address and port that rank 0 has written; those of an earlier step have another key."""
        path, deadline = self.folder / RENDEZVOUS, time.monotonic() + LATE_S
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                place = json.loads(path.read_text())
                if place["key"] == self._key:
                    return place["address"], place["port"]
            time.sleep(LOOK_S)
        node = os.environ.get("SLURMD_NODENAME", "?")
        what = f"rank {self.rank} on {node} found no rank 0 by {path} within {LATE_S:g} s"
        raise NoRendezvous(f"{what} -> out= on a file system that all nodes share")


def address() -> str:
    """This node's address on the network on which it sees the node of srun."""
    there = os.environ[PARENT]
    with socket.socket(socket.AF_INET6 if ":" in there else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((there, 9))  # sends nothing
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
