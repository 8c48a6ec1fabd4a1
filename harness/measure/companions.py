"""Processes that keep the other cores at work while something is timed, as the other devices of a run do.

    this process   | times layer 0 | layer 1 | ...       they share memory bandwidth, caches and the clock's frequency
    companion      | the same layers, again and again

On the CPUs of one machine a layer takes a tenth longer, and more, where its neighbour computes, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from harness.launch.die_with_parent import die_with
from harness.launch.signals import ENDING


@contextmanager
def companions(count: int, work: Callable[[], object]) -> Iterator[None]:
    """Within it `count` processes `work` again and again; each has done it once before the first line.

    They are forks of this process, so `work` may use what is there. One that fails ends without a word.
    """
    started: list[int] = []
    try:
        ready = [_start(work, started) for _ in range(count)]
        for pipe in ready:
            with open(pipe, "rb") as file:
                file.read(1)
        yield
    finally:
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _start(work: Callable[[], object], started: list[int]) -> int:
    """Start one; returns the pipe on which it says that it has worked once, or that ends with it."""
    parent, (reader, writer) = os.getpid(), os.pipe()
    if pid := os.fork():
        started.append(pid)
        os.close(writer)
        return reader
    try:
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        die_with(parent)
        os.close(reader)
        work()
        os.write(writer, b".")
        while True:
            work()
    finally:
        os._exit(1)
