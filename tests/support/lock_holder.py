"""A process that holds the lock of a folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.config import registry

HOLD = """
import subprocess, sys, time
from pathlib import Path
from harness.run import folder_lock
with folder_lock.held(Path(sys.argv[1])) as lock:
    if len(sys.argv) > 2:
        code = "import sys; print('there', flush=True); sys.stdin.read()"
        given = folder_lock.handed_on(lock)
        subprocess.Popen([sys.executable, "-c", code], pass_fds=given.values())
    else:
        print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(folder: Path, *with_child: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the lock, and maybe a child that has inherited it."""
    command = [sys.executable, "-c", HOLD, str(folder), *with_child]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=registry.ROOT)
    assert process.stdin and process.stdout
    try:
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.stdin.close()  # ends the child
        process.wait()
        process.stdout.close()
