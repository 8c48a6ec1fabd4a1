"""A rank that is started alone, by srun or torchrun: it joins the others, where `forked_ranks` would fork it.

    rank 0: TCPStore on a free port --> RUN_DIR/rendezvous.json --> rank 1, 2, ...: the same store

Rank 0 opens the store and writes its address into the run's folder. With srun nothing depends on names of nodes, which
need not resolve: an address is the one from which a node sees the parent's. torchrun says rank 0's (MASTER_ADDR). The
parent follows the ranks by files in the run's folder, and by lines in its log about their end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore

from harness.core import files
from harness.core.problem import CannotRun, Problem
from harness.core.run_files import RENDEZVOUS
from harness.host import launched
from harness.host.launched import Place
from harness.launch import mpi, network, process_group

T = TypeVar("T")


def run_in_step(count: int, function: Callable[[], T], device: str, with_mpi: bool, rendezvous: Rendezvous) -> T:
    """Call `function` as one of `count` ranks; returns what it returned in rank 0. Every other rank exits here."""
    if rendezvous.place.count != count:
        message = f"is not the number of ranks of the plan, {count}"
        hint = "start run.py: it starts the ranks"
        raise CannotRun([Problem(rendezvous.place.count_name, rendezvous.place.count, message, hint=hint)])
    process_group.join(rendezvous.rank, count, device, rendezvous.place.local, store=rendezvous.store())
    if with_mpi:
        mpi.join_step_world(count, device)
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


LATE_S = 180.0
"""Seconds after the first rank in which all others must start: all load torch from the same disk."""
LOOK_S = 0.05


class NoRendezvous(RuntimeError):
    """The ranks did not find each other; the message says how to fix it."""


@dataclass(frozen=True)
class Rendezvous:
    """The file in a run's folder by which the ranks of one start find rank 0.

    `token` is from the parent, which may start ranks several times.
    """

    folder: Path
    token: str
    place: Place = field(default_factory=launched.place)
    """As the variables say it now: those of torchrun are set in every rank once it has joined."""

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def _key(self) -> str:
        return f"{self.token}.{self.place.step}"

    def store(self) -> TCPStore:
        """The store that all ranks have; `torch.distributed` gets gloo's network from it, too. Raises NoRendezvous."""
        own, late = self.place, timedelta(seconds=LATE_S)
        if own.rank == 0:
            here = network.address(own.address)
            network.use_that_of(here)
            store = TCPStore(here, 0, own.count, True, late, wait_for_workers=False)
            known = own.address if own.count_name == launched.WORLD else here  # here it may resolve to 127.0.1.1
            files.write_text(
                self.folder / RENDEZVOUS, json.dumps({"key": self._key, "address": known, "port": store.port})
            )
            return store
        there, port = self._rank_0()
        network.use_that_of(network.address(there))
        return TCPStore(there, port, own.count, False, late)

    def _rank_0(self) -> tuple[str, int]:
        """The address and port that rank 0 has written; those of an earlier step have another key."""
        path, deadline = self.folder / RENDEZVOUS, time.monotonic() + LATE_S
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                place = json.loads(path.read_text())
                if place["key"] == self._key:
                    return place["address"], place["port"]
            time.sleep(LOOK_S)
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        what = f"rank {self.rank} on {node} found no rank 0 by {path} within {LATE_S:g} s"
        raise NoRendezvous(f"{what} -> out= on a file system that all nodes share")
