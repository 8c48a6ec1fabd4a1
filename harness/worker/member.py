"""A rank other than 0 that torchrun has started: it waits for the run of rank 0, takes part, and says how it ends.

    run.py, rank 3: becomes this process, loads torch, waits for the folder --fork--> the rank itself
                       `- forwards signals, writes into the log of the run how the rank was ended

It prints nothing, unless the rank fails: then what that has printed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from harness.core.run_files import HANG, LOG
from harness.host import launched, oom_killer
from harness.launch import same_checkout, slurm_log
from harness.launch.die_with_parent import die_with
from harness.launch.failure import Failure
from harness.launch.joined import herald
from harness.launch.joined.herald import END, RUN, SEEN
from harness.launch.signals import ENDING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PLANNED_S = 3600.0
"""Seconds that rank 0 may take to plan: it may have to profile the model first, and measure its machine."""
VISIBLE_S = 60.0
"""Seconds after which a folder that rank 0 has made is there on every node, if they share it."""
OVER_S = 15.0
"""Seconds that the rank has to end once the run is over; and rank 0, once the rank has ended."""
POLL_S, ASK_S = 0.05, 0.5


def join() -> list[str]:
    """Wait for the run of rank 0; returns, in a forked process that is the rank, the words of the worker's action.

    The process that calls it ends here: with 0 if there is nothing to do, or the rank has done it, else with 1.
    """
    store, own = herald.store(), launched.place()
    import torch._dynamo  # noqa: F401  while rank 0 plans

    store.set_timeout(timedelta(seconds=PLANNED_S))
    said = json.loads(store.get(RUN))
    if not said:
        _over(store, 0)
    folder = Path(said["folder"])
    if wrong := same_checkout.unfit(folder, said["code"], VISIBLE_S, "rank 0", "nodes"):
        print(f"rank {own.rank} on {socket.gethostname()}: {wrong}", file=sys.stderr, flush=True)
        with suppress(OSError):
            Failure("error", f"rank {own.rank} on {socket.gethostname()}: {wrong}", rank=own.rank).report(folder)
        _over(store, 1)
    with tempfile.TemporaryFile() as output:
        parent, kills = os.getpid(), oom_killer.kill_count()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        if (pid := os.fork()) == 0:
            die_with(parent)
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            return [str(folder), "train", said["start"], said["token"]]
        if code := _Watch(store, folder, pid).end():
            killed = code == -signal.SIGKILL and oom_killer.was_oom_kill(kills)
            _report(folder, own.rank, code, output, "Out Of Memory" if killed else "")
    _over(store, 1 if code else 0)


@dataclass
class _Watch:
    """Waits for the rank, a process `pid` of its own session."""

    store: TCPStore
    folder: Path
    pid: int
    over_s: float | None = None
    asked: bool = False

    def end(self) -> int:
        """Its exit code; -9 if signal 9 has ended it."""
        looked = time.monotonic()
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if (got := signal.sigtimedwait(ENDING, POLL_S)) is not None:
                os.kill(self.pid, got.si_signo)
            if time.monotonic() - looked > ASK_S:
                looked = time.monotonic()
                self._look()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what the rank has started
        return os.waitstatus_to_exitcode(ended[1])

    def _look(self) -> None:
        """Have the rank write what it does, if rank 0's parent asks for it; end it some time after the run."""
        if (hangs := (self.folder / HANG).is_dir()) and not self.asked:
            os.kill(self.pid, signal.SIGUSR2)
        self.asked = hangs
        if self.over_s is None and _is_over(self.store):
            self.over_s = time.monotonic() + OVER_S
        if self.over_s is not None and time.monotonic() > self.over_s:
            os.kill(self.pid, signal.SIGKILL)


def _is_over(store: TCPStore) -> bool:
    try:
        return bool(store.check([END]))
    except RuntimeError:  # whoever had the store is gone
        return True


def _report(folder: Path, rank: int, code: int, output: IO[bytes], how: str) -> None:
    """Write how the rank ended into the log of the run, and print what it has printed."""
    line = slurm_log.task_line(socket.gethostname(), rank, code, how)
    with suppress(OSError), (folder / LOG).open("ab") as log:
        log.write(line.encode())
    with suppress(OSError):  # unless the rank itself has said why
        Failure("error", line.strip(), rank=rank).report(folder)
    output.seek(0)
    shutil.copyfileobj(output, sys.stderr.buffer)
    sys.stderr.buffer.flush()
    print(line, end="", file=sys.stderr, flush=True)


def _over(store: TCPStore, code: int) -> NoReturn:
    """End with this exit code, once rank 0's parent has recorded the run: torchrun ends all with the first failure."""
    with suppress(RuntimeError):  # whoever had the store is gone
        if code:
            store.set_timeout(timedelta(seconds=OVER_S))
            store.wait([END])
        store.set(f"{SEEN}/{store.add(SEEN, 1)}", "")
    sys.stdout.flush()
    os._exit(code)
