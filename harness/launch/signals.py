"""Handle SIGINT, SIGTERM, SIGUSR1 and SIGHUP while a run is active."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""The signals by which a user, a scheduler or a container asks a run to end."""


class Preempted(KeyboardInterrupt):
    """The user or the scheduler ended the run; the message names the signal, `number` is it."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


class Signals:
    """Handlers of SIGINT, SIGTERM, SIGUSR1 and SIGHUP while a run is active; see `preemptible`.

    While `noting`, the first one is only noted, with its name in `asked`, and so are those after it: only SIGINT, from
    a user who does not want to wait, is raised then.
    """

    def __init__(self) -> None:
        self.ignored = self.noting = False
        self.asked = ""

    def handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.ignored:
            return
        if self.noting and not (self.asked and number == signal.SIGINT):
            self.asked = self.asked or name
            return
        self.ignored = True
        raise Preempted(f"ended by {name}", number)


@contextmanager
def preemptible() -> Iterator[Signals]:
    """Within it these signals raise `Preempted`, once: further ones do not disturb the clean-up.

    Nor does any after `ignored` of what is yielded has been set to True. One that whoever started this process has
    ignored stays so (`nohup`: SIGHUP). Without effect outside the main thread.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    heeded = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, signals.handle) for number in heeded}
    try:
        yield signals
    finally:
        for number, action in former.items():
            signal.signal(number, action)


@contextmanager
def blocked() -> Iterator[None]:
    """Within it this thread takes none of these signals, and a process that it starts takes none in its whole life.

    A signal to all processes of a run at once then reaches the parent alone, which has the ranks stop in order. Those
    that come meanwhile are delivered at the end.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
