"""The name of a run and the folder of its files."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from harness.problem import CannotRun, Problem


def new_id(overrides: Sequence[str]) -> str:
    """Short, unique and in order of time: 20250131-235959-1a2b3c."""
    now = time.time_ns()
    digest = hashlib.blake2b(repr((list(overrides), now, os.getpid())).encode(), digest_size=3).hexdigest()
    return f"{datetime.fromtimestamp(now / 1e9):%Y%m%d-%H%M%S}-{digest}"


def make(out: str | None, record_id: str) -> Path:
    """`out`, or runs/<date>/<id>. Raises `CannotRun` where that cannot be a folder."""
    date = f"{record_id[:4]}-{record_id[4:6]}-{record_id[6:8]}"
    folder = Path(out) if out else Path("runs") / date / record_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem(f"out {folder}", f"cannot be made a folder: {error.strerror}", "out=DIR")
        raise CannotRun([problem]) from error
    return folder.resolve()
