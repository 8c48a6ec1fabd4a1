"""What SIGINT, SIGTERM, SIGUSR1 and SIGHUP do while a run is active."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Preempted(KeyboardInterrupt):
    """The user or the scheduler ended the run; the message names the signal, `number` is it."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


class Signals:
    """What SIGINT, SIGTERM, SIGUSR1 and SIGHUP do while a run is active; see `preemptible`.

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

    Nor does any after `ignored` of what is yielded has been set to True. Without effect outside the main thread.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    former = {number: signal.signal(number, signals.handle) for number in numbers}
    try:
        yield signals
    finally:
        for number, action in former.items():
            signal.signal(number, action)
