"""The signals of a training process: a thread waits for them, so that no call of a library is interrupted.

    SIGINT, SIGTERM, SIGUSR1, SIGHUP    to all processes of the run: the parent asks the ranks to stop, nothing else
                                        to this process alone: it ends by the signal, and is reported as any other end
    SIGUSR2                             the parent sees no progress: the process writes what it is doing (`hang`)

Whether a signal came to all shows in the file `stop`, which the parent then writes. A training process is started with
these signals blocked (`signals.blocked`); a forked rank has no thread of its host, and watches again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.core.run_files import STOP
from harness.host import slurm_job
from harness.interfaces import Activity
from harness.launch import hang
from harness.launch.signals import ENDING

PATIENCE_S = 2.0
"""How long the parent may take, on a busy machine, to ask for a stop after a signal to all."""
LOOK_S = 0.02


@dataclass
class SignalWatcher:
    """Watches for the process that is `rank` (None: it has forked the `ranks`, of which it knows the process ids)."""

    folder: Path
    rank: int | None = None
    activity: Callable[[], Activity] = Activity
    ranks: dict[int, int] = field(default_factory=dict)

    def start(self) -> None:
        """Watch from now on. To be called in the main thread."""
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [*ENDING, signal.SIGUSR2])
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def _watch(self) -> None:
        while True:
            number = signal.sigwait([*ENDING, signal.SIGUSR2])
            if number == signal.SIGUSR2:
                hang.dump(self.folder, self.rank, self.activity(), self.ranks)
            elif not self._is_for_all(number):
                _end_by(number)

    def _is_for_all(self, number: int) -> bool:
        """Whether the parent was sent the signal, too. Slurm sends SIGTERM and SIGUSR1 to the nodes of a job at moments
        of its own: the parent knows what to do."""
        if number in (signal.SIGTERM, signal.SIGUSR1) and slurm_job.current():
            return True
        deadline = time.monotonic() + PATIENCE_S
        while not (self.folder / STOP).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return True


def _end_by(number: int) -> None:
    """End this process by a signal, as if nobody had watched."""
    ctypes.CDLL(None).signal(number, None)  # SIG_DFL, which Python sets in the main thread only
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


_watcher: SignalWatcher | None = None


def watch(folder: Path, rank: int | None) -> None:
    """Have the signals of this process watched: that of a worker, whose run is in `folder`."""
    global _watcher
    _watcher = SignalWatcher(folder, rank)
    _watcher.start()


def watch_in_rank(rank: int) -> None:
    """Have them watched in a forked rank, if its host does."""
    global _watcher
    if _watcher:
        _watcher = replace(_watcher, rank=rank, ranks={})
        _watcher.start()


def describe(activity: Callable[[], Activity]) -> None:
    """From now on `activity` says what this process, and each rank that it forks, is doing."""
    if _watcher:
        _watcher.activity = activity


def forked(rank: int, pid: int) -> None:
    """This process has forked a rank."""
    if _watcher:
        _watcher.ranks[rank] = pid
