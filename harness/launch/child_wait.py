"""Wait for a child process without work of its own: what looks at a run often takes time from what it measures."""

from __future__ import annotations

import os
import select
import subprocess
from contextlib import suppress

from harness.launch.fork_server import ForkedWorker

LOOK_S = 0.25
"""Seconds between two looks at a run."""


def ends_within(child: subprocess.Popen[bytes] | ForkedWorker, seconds: float) -> bool:
    """Whether a child process has ended, or does within so many seconds; sleeps until then, and no longer than it runs.

    `Popen.wait` with a timeout looks again and again, 20 times a second and more: it is for Pythons and kernels without
    descriptors of processes, and for want of descriptors.
    """
    if child.poll() is not None:
        return True
    descriptor = None if isinstance(child, ForkedWorker) else _descriptor(child.pid)
    if descriptor is None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        return child.poll() is not None
    try:
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        ready.poll(1000.0 * seconds)
    finally:
        os.close(descriptor)
    return child.poll() is not None


def _descriptor(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where there is none to be had."""
    if not hasattr(os, "pidfd_open"):  # of a Python that was built for older kernels, as conda's
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # of a sandbox, without descriptors that are free, or of a child that nobody has to wait for
        return None
