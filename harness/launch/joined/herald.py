"""What rank 0's parent says to the ranks that torchrun has started elsewhere, in torchrun's store.

    parent (no torch) --stdin--> herald (this module as a script) --store--> `harness.worker.member` of every other rank
         a line: folder, step, token, code          key RUN
         end of stdin                               key END

Where the launcher has no store (it sets the variables alone), the herald has it, at MASTER_PORT. A herald whose parent
is killed says that, too, to the ranks that come within `LAST_S`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import IO, TYPE_CHECKING

from harness.launch.same_checkout import ROOT, code
from harness.launch.signals import blocked

if TYPE_CHECKING:
    from torch.distributed import TCPStore

RUN, END, SEEN = "regatta/run", "regatta/end", "regatta/seen"
"""Keys of the store: what is to be trained, that all is over, and how many ranks have seen that."""
MEET_S = 300.0
"""Seconds in which all ranks must be there: all load torch from the same disk."""
LAST_S = 10.0
"""Seconds that others may take to see the end, where the herald has the store; and to come, once its parent is gone."""
POLL_S = 0.1

_open: list[IO[bytes]] = []
"""The stdin of this process's herald, if it has one."""


@contextmanager
def started() -> Iterator[None]:
    """Within it `announce` reaches all ranks; at the end they learn that all is over."""
    with blocked():
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
            start_new_session=True,
        )
    assert process.stdin is not None
    _open.append(process.stdin)
    try:
        yield
    finally:
        _open.remove(process.stdin)
        process.stdin.close()
        try:
            process.wait(2 * LAST_S)
        except subprocess.TimeoutExpired:  # it still waits for ranks that have never come
            process.kill()
            process.wait()


def announce(folder: Path, start: str, token: str) -> None:
    """Have all other ranks train in `folder`, from step `start` on."""
    said = {"folder": str(folder.resolve()), "start": start, "token": token, "code": code()}
    _open[-1].write(json.dumps(said).encode() + b"\n")
    _open[-1].flush()


def store() -> TCPStore:
    """The store that all ranks reach by MASTER_ADDR and MASTER_PORT: torchrun's, or that of rank 0's herald."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns where addresses have no names
    import torch.distributed as dist
    from torch.distributed import TCPStore

    found = next(dist.rendezvous("env://", timeout=timedelta(seconds=MEET_S)))[0]
    assert isinstance(found, TCPStore)
    return found


def _listen(said: Queue[str | None], met: threading.Event, parent: int) -> None:
    """Put what comes on stdin into `said`, and None at its end. A herald that has not `met` the ranks `LAST_S` after
    its parent has been killed ends: else it would wait `MEET_S` for ranks that nobody starts any more."""
    for line in sys.stdin:
        said.put(line)
    said.put(None)
    while os.getppid() == parent:
        if met.wait(POLL_S):
            return
    if not met.wait(LAST_S):
        os._exit(1)


def main() -> None:
    """Say in the store what comes on stdin, and its end."""
    said, met = Queue[str | None](), threading.Event()
    threading.Thread(target=_listen, args=(said, met, int(sys.argv[1])), daemon=True).start()
    reached = store()
    met.set()
    for line in iter(said.get, None):
        reached.set(RUN, line)
    reached.set(END, "")
    reached.set(RUN, "{}")  # for a rank that has not heard of a run: there is none, or it is over
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        last = str(int(os.environ["WORLD_SIZE"]) - 1)
        reached.set_timeout(timedelta(seconds=LAST_S))
        reached.wait([f"{SEEN}/{last}"])


if __name__ == "__main__":
    main()
