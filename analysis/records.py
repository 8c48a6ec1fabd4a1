"""Records of runs, from the folders of sweeps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from harness.problem import CannotRun, Problem
from harness.record import RunRecord

RECORD = "record.json"


def load(folders: Iterable[Path]) -> list[RunRecord]:
    """Every record in these folders and right below them, the oldest first.

    Raises CannotRun for a folder that is not there, and SchemaError for a file that is no record.
    """
    paths: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise CannotRun([Problem(str(folder), "is not a folder")], "this analysis")
        paths |= {*folder.glob(RECORD), *folder.glob(f"*/{RECORD}")}
    return [RunRecord.load(path) for path in sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path))]
