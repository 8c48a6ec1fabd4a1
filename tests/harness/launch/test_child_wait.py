"""Waiting for a child process: until it ends, or for so long, wherever this runs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import pytest

from harness.launch.child_wait import ends_within


def refuses(number: int):
    def pidfd_open(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    return pidfd_open


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("lacks", ["nothing", "the function", errno.ENOSYS, errno.EPERM, errno.EMFILE, errno.ESRCH])
def test_a_child_is_waited_for(lacks: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a sandbox that does not know descriptors of processes, and by a Python that has none."""
    if lacks == "the function":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    elif isinstance(lacks, int):
        monkeypatch.setattr(os, "pidfd_open", refuses(lacks), raising=False)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not ends_within(child, 0.05)
    assert child.stdin
    child.stdin.close()
    began_s = time.monotonic()
    assert ends_within(child, 20.0) and time.monotonic() - began_s < 10.0
    assert child.returncode == 1 and ends_within(child, 0.0)
