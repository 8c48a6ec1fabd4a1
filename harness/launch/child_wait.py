"""Wait for a child process without work of its own: what looks at a run often takes time from what it measures."""

from __future__ import annotations

import os
import select
import subprocess
from contextlib import suppress

from harness.launch.fork_server import ForkedWorker

LOOK_S = 0.25
"""Seconds between two looks at a run. Its end is noticed at once."""


def ends_within(child: subprocess.Popen[bytes] | ForkedWorker, seconds: float) -> bool:
    """Whether a child process has ended, or does within so many seconds; sleeps until then.

    `Popen.wait` with a timeout looks again and again, 20 times a second and more.
    """
    if child.poll() is not None:
        return True
    if isinstance(child, subprocess.Popen):
        descriptor = os.pidfd_open(child.pid)
        try:
            ready = select.poll()
            ready.register(descriptor, select.POLLIN)
            ready.poll(1000.0 * seconds)
        finally:
            os.close(descriptor)
    else:
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
    return child.poll() is not None
