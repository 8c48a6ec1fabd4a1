"""Runs that harness.trackers.wandb has mirrored to Weights & Biases: files among a run's, offline and on the server."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from analysis import beside
from harness.record import RunRecord
from harness.run_files import RECORD
from harness.serial import SchemaError
from harness.trackers.wandb import FILES

PREFIX = "wandb:"
_TIMEOUT_S = 30
Reading = tuple[str, Callable[[], Any]]
"""Where a record is, and what reads its JSON."""


def can_be(place: str) -> bool:
    """Whether it is a folder that is there, or reads like ENTITY/PROJECT."""
    return Path(place).is_dir() or not (place.startswith(("/", ".", "~")) or place.count("/") > 1)


def readings(place: str) -> Iterator[Reading]:
    """The runs in or below a folder, or those of ENTITY/PROJECT. Raises SchemaError where neither can be reached."""
    yield from _offline(Path(place)) if Path(place).is_dir() else _online(place)


def _offline(folder: Path) -> Iterator[Reading]:
    for found in sorted(folder.rglob("*run-*/files")):
        yield str(found), lambda path=found / RECORD: json.loads(path.read_bytes())  # type: ignore[misc]


def _online(path: str) -> Iterator[Reading]:
    import wandb

    try:
        runs = list(wandb.Api(timeout=_TIMEOUT_S).runs(path))
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SchemaError(f"W&B cannot be reached: {said}   -> wandb login, or a folder: {PREFIX}FOLDER") from error
    for run in runs:
        yield PREFIX + "/".join(run.path), lambda run=run: _downloaded(run)  # type: ignore[misc]


def _downloaded(run: Any) -> Any:
    """A run's record as JSON, with what its other files tell."""
    with tempfile.TemporaryDirectory() as folder:
        for file in run.files(names=list(FILES)):  # a simulated run has no steps
            file.download(root=folder, exist_ok=True)
        record = RunRecord.load(Path(folder) / RECORD)
        record.manifest[beside.ORIGIN] = folder
        return beside.whole(record).to_json()
