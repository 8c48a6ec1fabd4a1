"""The files of a run's checkpoints: RUN_DIR/checkpoints/step-N.pt, after N steps, the last two kept.

Importing this module does not import torch: a file is checked by the checksums inside (it is a zip).
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from harness.core.run_files import CHECKPOINTS

KEPT = 2
_NAME = re.compile(r"step-(\d+)\.pt")
_PART, _DAMAGED = ".part", ".damaged"


def steps(run_dir: Path) -> list[int]:
    """Steps after which there is a checkpoint, the newest first."""
    found = (_NAME.fullmatch(path.name) for path in (run_dir / CHECKPOINTS).glob("step-*.pt"))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def after_steps(step: int) -> str:
    """Return the words "after 7 steps"."""
    return f"after {step} step{'s' * (step != 1)}"


def place(run_dir: Path, step: int) -> Path:
    """The file of the checkpoint after so many steps."""
    return run_dir / CHECKPOINTS / f"step-{step}.pt"


def write(run_dir: Path, step: int, fill: Callable[[IO[bytes]], None]) -> None:
    """Have `fill` write a checkpoint, which is whole or not there; older ones go, but for the one before.

    On any failure (a full disk) no part of it stays, and the older ones do.
    """
    path = place(run_dir, step)
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(_PART)
    try:
        with part.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    for old in steps(run_dir)[KEPT:]:
        place(run_dir, old).unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make the new name outlive a crash of the machine, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system may not know this
            os.fsync(handle)
    finally:
        os.close(handle)


def is_whole(run_dir: Path, step: int) -> bool:
    """Whether the checkpoint can be read and is as it was written: by the checksums inside, since it is a zip."""
    try:
        with zipfile.ZipFile(place(run_dir, step)) as file:
            return file.testzip() is None
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError):
        return False


def set_aside(run_dir: Path, step: int) -> None:
    """Rename a checkpoint that cannot be used."""
    path = place(run_dir, step)
    path.replace(path.with_suffix(_DAMAGED))


def remove_partial(run_dir: Path) -> None:
    """Remove files of a writer that was killed."""
    for path in (run_dir / CHECKPOINTS).glob(f"*{_PART}"):
        path.unlink(missing_ok=True)


def remove_all(run_dir: Path) -> None:
    """Remove all checkpoints."""
    for path in (run_dir / CHECKPOINTS).glob("step-*"):
        path.unlink(missing_ok=True)
