"""A second process that loads compiled code while this one reads its configuration and plans, and executes it.

    this process     reads the configuration | plans ..... | simulates -->  <-- simulates -->  <--
    the second one   loads numba, its code ........|          executes ^       executes ^

It helps the search of one engine for a cluster that is not this machine, on whose cores nothing is measured. Where it
is killed, or does not answer, this process loads the code by itself.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from harness.core.problem import bare_key
from harness.launch.die_with_parent import die_with
from harness.launch.signals import blocked

LIMIT_S = 60.0
"""Seconds until an answer: machine code that is not there is made in six."""
BUFFER = 2**20


@contextmanager
def helping(overrides: Sequence[str]) -> Iterator[None]:
    """Has a second process execute compiled code for this one, if that pays."""
    if not pays(overrides):
        yield
        return
    one = SecondProcess()
    try:
        from harness.simulator.compiled import loops  # by now the other one is importing, too

        loops.other = one
        yield
        loops.other = None
    finally:
        one.end()


def pays(overrides: Sequence[str]) -> bool:
    """Whether one engine is searched, and a core is free."""
    given = {bare_key(text): text.partition("=")[2] for text in overrides}
    engine, cluster = given.get("engine", "all"), given.get("cluster", "local")
    return engine != "all" and "," not in engine and cluster != "local" and len(os.sched_getaffinity(0)) > 1


class SecondProcess:
    """Called with the name of a function of `harness.simulator.compiled.loops`, and arguments. Raises OSError, EOFError
    or UnpicklingError where it does not answer, and in processes that are forked from this one."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        here, there = socket.socketpair()
        with blocked():  # a signal to both is for this one
            self.pid = os.fork()
            if not self.pid:
                here.close()
                _serve(there, self.owner)
        there.close()
        here.settimeout(LIMIT_S)
        self.socket, self.file = here, here.makefile("rwb", BUFFER)

    def __call__(self, name: str, *arguments: object) -> Any:
        if os.getpid() != self.owner:
            raise OSError("is another one's")
        pickle.dump((name, arguments), self.file, pickle.HIGHEST_PROTOCOL)
        self.file.flush()
        return pickle.load(self.file)

    def end(self) -> None:
        """Ends it, whatever it is doing."""
        if os.getpid() == self.owner:
            os.kill(self.pid, signal.SIGKILL)  # nobody else waits for it
            os.waitpid(self.pid, 0)
            with suppress(OSError):  # what was not sent
                self.file.close()
            self.socket.close()


def _serve(there: socket.socket, parent: int) -> NoReturn:
    """Loads compiled code and does what is asked, until the parent ends or something fails, which the parent sees."""
    try:
        die_with(parent)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        from harness import simulator
        from harness.simulator.compiled import loops

        simulator.load()
        file = there.makefile("rwb", BUFFER)
        while True:
            name, arguments = pickle.load(file)
            pickle.dump(getattr(loops, name)(*arguments), file, pickle.HIGHEST_PROTOCOL)
            file.flush()
    finally:
        os._exit(1)
