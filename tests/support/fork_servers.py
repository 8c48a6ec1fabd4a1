"""One fork server for all runs that a test starts: each worker would load torch, in two seconds, which others test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from harness.launch.fork_server import VARIABLE

_STARTING = f"""
import os, sys
from harness.launch import fork_server, supervisor
with fork_server.scope():
    supervisor.start_fork_server()
    print(os.environ["{VARIABLE}"], flush=True)
    sys.stdin.read()
"""


@contextmanager
def serving(folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment of commands in a folder with sources that share a server of these sources."""
    command = [sys.executable, "-c", _STARTING]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        yield {**environment, VARIABLE: process.stdout.readline().strip()}
        process.stdin.close()
