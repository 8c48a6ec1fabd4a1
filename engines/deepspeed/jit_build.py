"""Compiling an op of DeepSpeed's, once, by one process at a time.

torch marks a build by a file, and waits for ever for one that a killed run has left. Here ops lie in a folder of our
own, whose lock ends with its process; who holds it knows that torch's file is an old one.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from harness.host import profile_cache


def folder() -> Path:
    """Return the folder of compiled ops: $REGATTA_CACHE/ops, then the versions of torch and Python."""
    versions = f"torch-{torch.__version__}-python-{platform.python_version()}"
    return profile_cache.folder().parent / "ops" / versions


@contextmanager
def alone(op: str) -> Iterator[None]:
    """Within it `op` is compiled, if it has to be, by this process alone. Says so in the log."""
    find_ninja()
    there = folder()
    (there / op).mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(there)
    if not (there / op / f"{op}.so").exists():
        print(f"compiling DeepSpeed's {op} into {there / op}, once: minutes on a busy machine", flush=True)
    with (there / op / "alone").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (there / op / "lock").unlink(missing_ok=True)
        yield


def find_ninja() -> None:
    """torch compiles with a command of that name; in an environment that is not activated only Python finds it."""
    if shutil.which("ninja") is None:
        from ninja import BIN_DIR

        os.environ["PATH"] = os.pathsep.join([BIN_DIR, os.environ.get("PATH", os.defpath)])
