"""Where the ranks meet that srun has started: rank 0 opens a store and writes its address into the run's folder.

    rank 0: TCPStore on a free port --> RUN_DIR/meeting.json --> rank 1, 2, ...: the same store

Nothing depends on names of nodes, which need not resolve: an address is that from which a node sees the parent's.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from harness import files, srun

PARENT = "SLURM_LAUNCH_NODE_IPADDR"
"""The address of the node where srun runs, as the other nodes see it."""
GLOO = "GLOO_SOCKET_IFNAME"
LATE_S = 180.0
"""So long after the first a rank may come: all load torch from the same disk."""
LOOK_S = 0.05
SIOCGIFADDR = 0x8915


class NoMeeting(RuntimeError):
    """The ranks did not find each other; the message says what mends it."""


@dataclass(frozen=True)
class Meeting:
    """The place of one step of Slurm in the run's folder; `token` is the parent's, who may start several steps."""

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
        """The store that all ranks have; `torch.distributed` gets gloo's network from it, too. Raises NoMeeting."""
        here = address()
        if device := interface(here):
            os.environ.setdefault(GLOO, device)  # gloo goes by the host's name, which often stands for 127.0.1.1
        late = timedelta(seconds=LATE_S)
        if self.rank == 0:
            store = TCPStore(here, 0, self.count, True, late, wait_for_workers=False)
            place = {"key": self._key, "address": here, "port": store.port}
            files.write_text(self.folder / srun.MEETING, json.dumps(place))
            return store
        there, port = self._place()
        return TCPStore(there, port, self.count, False, late)

    def _place(self) -> tuple[str, int]:
        """What rank 0 has written; an older meeting has another key."""
        path, deadline = self.folder / srun.MEETING, time.monotonic() + LATE_S
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                place = json.loads(path.read_text())
                if place["key"] == self._key:
                    return place["address"], place["port"]
            time.sleep(LOOK_S)
        node = os.environ.get("SLURMD_NODENAME", "?")
        what = f"rank {self.rank} on {node} found no rank 0 by {path} within {LATE_S:g} s"
        raise NoMeeting(f"{what} -> out= on a file system that all nodes share")


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
